"""Signs of life: told apart without a clock that can be set, and given on a full disk too."""

import os
from pathlib import Path

from longstraw_core.training.heartbeat import Heartbeat, Silence, heartbeat_path, read_beat


def test_silence_grows_while_no_new_beat_comes_and_ends_with_one() -> None:
    silence = Silence(longest_step=2.0)
    looks = [silence.seconds(3, given, now) for given, now in ((7, 100.0), (7, 101.0), (7, 102.5), (8, 103.0))]
    assert looks == [0.0, 1.0, 2.5, 0.0]
    assert silence.seconds(4, 7, 103.0) == 0.0


def test_a_clock_that_was_set_is_no_silence() -> None:
    silence = Silence(longest_step=2.0)
    hour = 3600 * 10**9
    times = (hour, 2 * hour, 1, 3 * hour)
    assert [silence.seconds(0, given, float(now)) for now, given in enumerate(times)] == [0.0] * 4


def test_a_machine_that_stood_still_counts_for_one_look() -> None:
    silence = Silence(longest_step=2.0)
    silence.seconds(0, 7, 100.0)
    assert silence.seconds(0, 7, 500.0) == 2.0


def test_a_rank_goes_on_giving_signs_of_life_when_the_disk_is_full(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, 0)
    os.utime(heartbeat_path(tmp_path, 0), (1.0, 1.0))
    (tmp_path / "heartbeat-00000.new").symlink_to("/dev/full")
    heartbeat.enter("replay")
    found = read_beat(tmp_path, 0)
    assert found is not None
    assert (found[0].phase, heartbeat.phase) == ("start", "replay")
    assert found[1] > 10**18
