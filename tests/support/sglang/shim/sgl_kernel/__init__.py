"""Stands in for SGLang's CPU kernels, of which no package is published: plain torch, for small test models only.

Named here is what SGLang 0.5.23 imports on a CPU without AMX; whatever a test model does not call raises.
"""

import numpy
import torch

from sgl_kernel import mamba

mamba.register()


def assign_req_to_token_pool_cpu(requests, table, starts, ends, locations, pool_length, *_):
    """Write each request's new cache locations into its row of the table, at its token positions."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[request, start:end] = locations[taken : taken + end - start].to(table.dtype)
        taken += end - start


def _missing(name: str):
    def refuse(*arguments, **options):
        raise NotImplementedError(f"sgl_kernel.{name} is not part of the test stand-in")

    return refuse


for _name in (
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "verify_tree_greedy_cpu",
    "rotate_input_ids_cpu",
    "build_draft_decode_metadata_cpu",
):
    globals()[_name] = _missing(_name)


def _murmur_hash32(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits) of the words seed low, seed high, position, column: [seeds, columns], uint32."""
    word = numpy.uint64(0xFFFFFFFF)

    def number(value: int) -> numpy.uint64:
        return numpy.uint64(value)

    def rotate(value, bits: int):
        return ((value << number(bits)) | (value >> number(32 - bits))) & word

    def mix(state, block):
        block = (rotate((block * number(0xCC9E2D51)) & word, 15) * number(0x1B873593)) & word
        return (rotate(state ^ block, 13) * number(5) + number(0xE6546B64)) & word

    seed = seeds.view(torch.int64).numpy().astype(numpy.uint64)[:, None]
    state = mix(numpy.zeros_like(seed), seed & word)
    state = mix(state, seed >> number(32))
    state = mix(state, positions.numpy().astype(numpy.uint64)[:, None] & word)
    state = mix(state, columns.numpy().astype(numpy.uint64)[None, :] & word)
    state = state ^ number(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> number(shift))) * number(factor)) & word
    state ^= state >> number(16)
    return torch.from_numpy(state.astype(numpy.int64)).to(torch.uint32)


_murmur_hash32.default = _murmur_hash32
torch.ops.sgl_kernel.murmur_hash32_cpu = _murmur_hash32
