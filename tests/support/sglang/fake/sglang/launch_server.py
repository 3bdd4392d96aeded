"""A stand-in for `python -m sglang.launch_server`: the same routes and reply fields, tokens drawn from the seed alone.

It has no model. `tests/sglang` pins the shape of its replies to those of the real server. The environment steers it:
FAKE_SGLANG_TOKEN_SECONDS slows it down, FAKE_SGLANG_DIE_AFTER kills it after so many responses, FAKE_SGLANG_BROKEN
makes it end at the start, FAKE_SGLANG_BAD_ADAPTER is what it does at a request with an adapter (die or refuse),
FAKE_SGLANG_LOGPROB is the log-probability of every token, FAKE_SGLANG_SEED the seed of every response.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class State:
    """What the requests of one server share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        config = json.loads((Path(arguments.model_path) / "config.json").read_bytes())
        self.vocabulary = int(config.get("text_config", config)["vocab_size"])
        self.token_seconds = float(os.environ.get("FAKE_SGLANG_TOKEN_SECONDS", "0"))
        self.die_after = int(os.environ.get("FAKE_SGLANG_DIE_AFTER", "0"))
        self.lock = threading.Lock()
        self.aborted: set[str] = set()
        self.answered = 0
        self.running = 0
        self.most_running = 0


def generate(state: State, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Answer one request."""
    parameters, prompt = body["sampling_params"], body["input_ids"]
    adapters = [path.partition("=")[0] for path in state.arguments.lora_paths or []]
    if body.get("lora_path") not in (None, *adapters):
        return 400, {"error": {"message": f"Got LoRA adapter that has never been loaded: {body['lora_path']}"}}
    bad = os.environ.get("FAKE_SGLANG_BAD_ADAPTER")
    if bad and body.get("lora_path"):
        print("RuntimeError: the adapter has no weights for q_proj", flush=True)
        if bad == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return 400, {"error": {"message": "the adapter cannot be loaded"}}
    if len(prompt) + parameters["max_new_tokens"] > state.arguments.context_length:
        return 400, {"error": {"message": "Requested token count exceeds the model's maximum context length"}}
    stated = os.environ.get("FAKE_SGLANG_LOGPROB")
    tokens: list[int] = []
    reason: dict[str, Any] = {"type": "length", "length": parameters["max_new_tokens"]}
    value = int(os.environ.get("FAKE_SGLANG_SEED", parameters["sampling_seed"]))
    while len(tokens) < parameters["max_new_tokens"]:
        time.sleep(state.token_seconds)
        if body["rid"] in state.aborted or "*" in state.aborted:
            reason = {"type": "abort", "message": "Abort in decode", "status_code": None, "err_type": None}
            break
        value = (value * 6364136223846793005 + 1442695040888963407) % 2**64
        tokens.append((value >> 33) % state.vocabulary)
        if tokens[-1] in parameters["stop_token_ids"]:
            reason = {"type": "stop", "matched": tokens[-1]}
            break
    return 200, {
        "output_ids": tokens,
        "prompt_token_ids": prompt,
        "meta_info": {
            "id": body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "weight_version": "default",
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [[float(stated or -1.0 - token / 100), token, None] for token in tokens],
            "output_token_logprobs_length": len(tokens),
            "reasoning_tokens": 0,
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_versions": [{"version": "default", "start": 0, "end": len(tokens)}],
            "cached_tokens_details": None,
            "dp_rank": None,
            "e2e_latency": 0.0,
        },
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def do_GET(self) -> None:
        if self.path == "/health_generate":
            self._answer(200, {})
        elif self.path == "/server_info":
            settings = {
                **vars(self.state.arguments),
                "version": os.environ.get("FAKE_SGLANG_VERSION", "0.5.23"),
                "most_running": self.state.most_running,
            }
            self._answer(200, settings)
        else:
            self._answer(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.state
        if self.path == "/abort_request":
            state.aborted.add("*" if body.get("abort_all") else body["rid"])
            self._answer(200, {})
            return
        with state.lock:
            state.running += 1
            state.most_running = max(state.most_running, state.running)
        status, reply = generate(state, body)
        with state.lock:
            state.running -= 1
            state.answered += 1
            if state.die_after and state.answered > state.die_after:
                print("RuntimeError: the fake server was told to die", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        self._answer(status, reply)

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        print(*arguments, flush=True)


def follow(address: str) -> None:
    """What a rank above 0 does: meet rank 0, and return when that is gone."""
    host, _, port = address.rpartition(":")
    while True:
        with socket.socket() as meeting:
            if meeting.connect_ex((host, int(port))) == 0:
                with contextlib.suppress(ConnectionError):
                    meeting.recv(1)
                return
        time.sleep(0.1)


def wait_for_ranks(address: str) -> list[socket.socket]:
    """Rank 0's side of the meeting; what is returned keeps the others waiting."""
    listening = socket.create_server(("", int(address.rpartition(":")[2])))
    held = [listening]
    threading.Thread(target=lambda: held.append(listening.accept()[0]), daemon=True).start()
    return held


def main() -> int:
    """Serve until a signal ends it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context-length", type=int, required=True)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--dist-init-addr")
    parser.add_argument("--lora-paths", nargs="*")
    arguments, _ = parser.parse_known_args()
    if "FAKE_SGLANG_BROKEN" in os.environ:
        print("ValueError: " + os.environ["FAKE_SGLANG_BROKEN"], flush=True)
        return 1
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    signal.signal(signal.SIGTERM, lambda *_: (child.kill(), os._exit(0)))
    if arguments.node_rank > 0:
        follow(arguments.dist_init_addr)
        child.kill()
        return 0
    held = wait_for_ranks(arguments.dist_init_addr) if arguments.dist_init_addr else []
    Handler.state = State(arguments)
    ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()
    return len(held)


if __name__ == "__main__":
    sys.exit(main())
