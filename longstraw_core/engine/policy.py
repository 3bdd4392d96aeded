"""The policy: capture a prompt once, replay responses against it, sweep the accumulated gradient back through it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longstraw_core.engine.admission import admit_length, admit_temperature, admit_tokens
from longstraw_core.engine.layer_loop import run_layers
from longstraw_core.engine.token_logprobs import token_logprobs
from longstraw_core.mixers.exchange.collectives import Exchange, gathered_for_all
from longstraw_core.mixers.exchange.ownership import SegmentOwnership
from longstraw_core.mixers.exchange.rank_group import ALONE, RankGroup
from longstraw_core.mixers.exchange.traffic import TrafficMeter
from longstraw_core.mixers.families import bind_family
from longstraw_core.mixers.family import Layer, StateBytes
from longstraw_core.mixers.layer_weights import weights_on_use
from longstraw_core.resident.files import read_manifest
from longstraw_core.resident.identity import PrefixIdentity
from longstraw_core.resident.layer_state import LayerState, Produced
from longstraw_core.resident.ownership import PromptOwnership
from longstraw_core.resident.pool import ResidentPool
from longstraw_core.resident.prefix_state import PrefixState
from longstraw_core.spec.errors import SpecError
from longstraw_core.spec.receipts import GradientMode
from longstraw_core.spec.transaction import LayoutSpec

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all)."""


@dataclass(frozen=True)
class Replayed:
    """One replayed response."""

    logprobs_R: torch.Tensor
    """Log-probabilities of all response tokens, fp32, attached to the autograd graph when gradients are enabled."""
    entropy_R: torch.Tensor
    """Entropies of the distributions they were drawn from, fp32, without autograd."""


def state_bytes(
    layers: Sequence[Layer],
    layout: LayoutSpec,
    gradient: GradientMode,
    prompt_tokens: int,
    *,
    context: RankGroup = ALONE,
) -> StateBytes:
    """Return the bytes of this rank's part of one prompt's resident state, from shapes alone.

    The layers may be on the meta device. They must have been bound for the same `context`.
    """
    tokens = prompt_tokens - 1
    exact = gradient == "exact"
    ownership = _dealt(tokens, layout, context)
    boundaries = max(len(ownership.chunk_starts) - 1, 0) if exact else 0
    parts = [layer.state_bytes(ownership, boundaries, swept=exact) for layer in layers]
    return StateBytes(
        pages=sum(part.pages for part in parts),
        recurrent=sum(part.recurrent for part in parts),
        boundaries=sum(part.boundaries for part in parts),
        gradient_sinks=sum(part.gradient_sinks for part in parts) if exact else 0,
        choices=sum(part.choices for part in parts),
    )


def _dealt(tokens: int, layout: LayoutSpec, context: RankGroup) -> PromptOwnership:
    """How a prompt of `tokens` captured tokens is dealt, chunk by chunk."""
    return PromptOwnership.chunked(tokens, layout.prompt_chunk_tokens, rank=context.rank, ranks=context.size)


class Policy:
    """A PEFT-wrapped causal language model over resident prompt state.

    Args:
        model: PEFT model whose base belongs to a supported family; its base is frozen.
        layout: chunk and page sizes.
        gradient: which gradient is computed (docs/concepts.md).
        state_capacity_bytes: memory for resident state; None takes what is free now where it is kept.
        context: the ranks that share the tokens of every prompt and response. All of them make the same calls with the
            same arguments in the same order.
        experts: the ranks that share the experts.

    Raises:
        SpecError: model type, layer type, rope type or a number of ranks is not supported, or the LM head is trained.
    """

    def __init__(
        self,
        model: Any,
        layout: LayoutSpec,
        *,
        gradient: GradientMode,
        state_capacity_bytes: int | None = None,
        context: RankGroup = ALONE,
        experts: RankGroup = ALONE,
    ) -> None:
        base = model.get_base_model()
        self.model = model
        self.gradient: GradientMode = gradient
        self._layout = layout
        self.context = context
        self._family = bind_family(
            base,
            page_tokens=layout.page_tokens,
            selection_record=layout.selection_record,
            context=context,
            experts=experts,
        )
        self._exchange = Exchange(context, self._family.traffic, len(self._family.layers))
        self._weights = weights_on_use(base)
        if self._weights is not None:
            self._weights.count_with(self._family.traffic)
        if not isinstance(self._family.head, torch.nn.Linear) or self._family.head.weight.requires_grad:
            raise SpecError("the language-model head cannot be trained: remove lm_head from lora.targets")
        if isinstance(self._family.embedding, torch.nn.Embedding) and self._family.embedding.weight.requires_grad:
            raise SpecError("the embedding cannot be trained: remove embed_tokens from lora.targets")
        kept, used = self._family.state_device, self._family.device
        self.pool = ResidentPool(kept, state_capacity_bytes, pinned=kept.type == "cpu" and used.type == "cuda")

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary."""
        return self._family.vocabulary

    @property
    def max_positions(self) -> int:
        """Positions the model can be fed."""
        return self._family.max_positions

    @property
    def traffic(self) -> TrafficMeter:
        """What this rank sent to others, by phase and layer."""
        return self._family.traffic

    @property
    def captures_with_adapter(self) -> bool:
        """Whether the policy's own prompt state is captured with the adapter on."""
        return self.gradient != "response_adapter"

    def state_bytes(self, prompt_tokens: int) -> StateBytes:
        """Return the bytes that capturing, and in `exact` mode sweeping, a prompt allocates in this rank's pool."""
        return state_bytes(self._family.layers, self._layout, self.gradient, prompt_tokens, context=self.context)

    def capture(
        self, prompt_token_ids: Sequence[int], *, adapter: bool, progress: Progress | None = None
    ) -> PrefixState:
        """Run all but the last prompt token without autograd, chunk by chunk, and return the resident state.

        Args:
            prompt_token_ids: the whole prompt, at least one token.
            adapter: False captures with the adapter off: for the reference, and always in `response_adapter` mode.
            progress: told the tokens done after every chunk.

        Raises:
            DataRefused: the prompt is empty, too long or holds a token outside the vocabulary.
            SpecError: the state does not fit, or `adapter` contradicts the gradient mode.
        """
        admit_tokens(prompt_token_ids, vocabulary=self.vocabulary, name="prompt")
        admit_length(len(prompt_token_ids), 1, max_positions=self.max_positions)
        if adapter and not self.captures_with_adapter:
            raise SpecError("gradient mode response_adapter captures prompts with the adapter off")
        self.pool.require(self.state_bytes(len(prompt_token_ids)).captured, f"prompt of {len(prompt_token_ids)} tokens")
        state = self._new_state(prompt_token_ids, _dealt(len(prompt_token_ids) - 1, self._layout, self.context))
        swept = self.gradient == "exact" and adapter  # nothing is swept through the reference
        self.traffic.phase = "capture"

        def store(layer: int, produced: Produced) -> None:
            state.append(layer, produced, segment.ownership.tokens, keep_boundary=swept)

        try:
            with torch.no_grad(), self._adapter(on=adapter):
                for start, end in self._chunks(state.captured_tokens):
                    segment = self._family.segment(
                        SegmentOwnership(state.ownership, start, end - start),
                        state_gradient=False,
                        choices="record" if swept else "free",
                    )
                    run_layers(
                        self._family,
                        self._owned(state.prompt_token_ids[start:end], segment.ownership),
                        segment,
                        state,
                        last_layer_state_only=True,
                        on_produced=store,
                        weights=self._weights,
                    )
                    state.chunk_starts.append(start)
                    if progress is not None:
                        progress(end, state.captured_tokens)
        except BaseException:
            state.release()
            raise
        state.record_witness()
        return state

    def load_state(self, directory: Path, expected: PrefixIdentity) -> PrefixState:
        """Restore a stored prompt state.

        Raises:
            IntegrityError: the files belong to another identity or are damaged.
            DataRefused: the prompt does not fit this model.
            SpecError: the state does not fit into memory.
        """
        manifest = read_manifest(directory, expected)
        admit_tokens(manifest.prompt_token_ids, vocabulary=self.vocabulary, name="prompt")
        admit_length(len(manifest.prompt_token_ids), 1, max_positions=self.max_positions)
        self.pool.require(self.state_bytes(len(manifest.prompt_token_ids)).captured, f"prompt state {directory}")
        tokens = len(manifest.prompt_token_ids) - 1
        ownership = PromptOwnership(manifest.chunk_starts, tokens, self.context.rank, self.context.size)
        state = self._new_state(manifest.prompt_token_ids, ownership)
        try:
            state.restore(directory, expected)
        except BaseException:
            state.release()
            raise
        state.record_witness()
        return state

    def replay(
        self,
        state: PrefixState,
        response_token_ids: Sequence[int],
        *,
        temperature: float,
        adapter: bool = True,
    ) -> Replayed:
        """Return log-probabilities of a response behind the captured prompt.

        Feeds [last prompt token, response[:-1]]. With gradients enabled, `backward` through the log-probabilities
        accumulates parameter gradients and, in `exact` mode, the gradient of the resident state. Call
        `state.verify_witness()` after each response's backward.

        Every rank gets the whole response's log-probabilities and back-propagates into those of its own tokens only:
        when all ranks compute the same loss from them, the sum over ranks of the parameters' gradients is the
        gradient of that loss, each token's term once.

        Raises:
            DataRefused: the response is empty, too long or holds a token outside the vocabulary.
            SpecError: the gradient sinks do not fit into memory.
        """
        admit_tokens(response_token_ids, vocabulary=self.vocabulary, name="response")
        admit_length(state.prompt_tokens, len(response_token_ids), max_positions=self.max_positions)
        admit_temperature(temperature)
        state_gradient = self.gradient == "exact" and adapter and torch.is_grad_enabled()
        if state_gradient and not state.sinks_open:
            self.pool.require(self.state_bytes(state.prompt_tokens).gradient_sinks, "the prompt state's gradient")
            state.open_sinks()
        fed = (state.prompt_token_ids[-1], *response_token_ids[:-1])
        ownership = SegmentOwnership(state.ownership, state.captured_tokens, len(fed))
        self.traffic.phase = "replay"
        with self._adapter(on=adapter):
            x_RH = run_layers(
                self._family,
                self._owned(fed, ownership),
                self._family.segment(
                    ownership,
                    state_gradient=state_gradient,
                    prefix_adapted=self.captures_with_adapter,
                ),
                state,
                last_layer_state_only=False,
                checkpoint_layers=self._layout.checkpoint_layers,
                weights=self._weights,
            )
            hidden_RH = self._family.final_norm(x_RH)
            logprobs_R, entropy_R = token_logprobs(
                hidden_RH, self._family.head.weight, self._owned(response_token_ids, ownership), temperature=temperature
            )
        return Replayed(
            gathered_for_all(logprobs_R, self._exchange, ownership.counts, "log-probabilities"),
            self._exchange.gather_rows(entropy_R.detach(), ownership.counts, "entropies"),
        )

    def reverse_sweep(self, state: PrefixState, *, progress: Progress | None = None) -> None:
        """Back-propagate the state's accumulated gradient through the prompt, last chunk first (`exact` only).

        Every chunk is recomputed with autograd against the resident prefix; what its keys, values and final states
        contributed to later tokens is waiting in the sinks. Parameter gradients accumulate; the sinks are consumed
        and returned.

        Raises:
            SpecError: another gradient mode.
        """
        if self.gradient != "exact":
            raise SpecError(f"gradient mode {self.gradient} has no reverse sweep")
        if not state.sinks_open:
            return
        self.traffic.phase = "reverse_sweep"
        ends = [*state.chunk_starts[1:], state.captured_tokens]
        chunks = list(zip(state.chunk_starts, ends, strict=True)) if state.chunk_starts else []
        for start, end in reversed(chunks):
            self._sweep_chunk(state, start, end)
            if progress is not None:
                progress(state.captured_tokens - start, state.captured_tokens)
        state.close_sinks()

    def _sweep_chunk(self, state: PrefixState, start: int, end: int) -> None:
        outputs: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        ownership = SegmentOwnership(state.ownership, start, end - start)
        first, last = ownership.resident, ownership.resident + ownership.length

        def collect(layer: int, produced: Produced) -> None:
            for tensor, gradient in zip(produced, state.layers[layer].take_gradients(first, last), strict=True):
                if tensor.requires_grad:
                    outputs.append(tensor)
                    gradients.append(gradient.to(tensor.dtype))

        with torch.enable_grad(), self._adapter(on=True):
            run_layers(
                self._family,
                self._owned(state.prompt_token_ids[start:end], ownership),
                self._family.segment(ownership, state_gradient=True, choices="reuse"),
                state,
                last_layer_state_only=True,
                checkpoint_layers=self._layout.checkpoint_layers,
                on_produced=collect,
                weights=self._weights,
            )
        if outputs:
            torch.autograd.backward(outputs, gradients)

    def _new_state(self, prompt_token_ids: Sequence[int], ownership: PromptOwnership) -> PrefixState:
        def make_layers(pool: ResidentPool, owner: str) -> list[LayerState]:
            owners = [f"{owner}/layer {index}" for index in range(len(self._family.layers))]
            return self._family.new_states(pool, owners, ownership)

        return PrefixState(self.pool, prompt_token_ids, make_layers, ownership)

    def _chunks(self, tokens: int) -> Iterator[tuple[int, int]]:
        size = self._layout.prompt_chunk_tokens
        for start in range(0, tokens, size):
            yield start, min(start + size, tokens)

    def _owned(self, token_ids: Sequence[int], ownership: SegmentOwnership) -> torch.Tensor:
        """Token ids of a segment that this rank owns."""
        return torch.tensor(list(token_ids[ownership.owned]), dtype=torch.int64, device=self._family.device)

    @contextlib.contextmanager
    def _adapter(self, *, on: bool) -> Iterator[None]:
        if on:
            yield
        else:
            with self.model.disable_adapter():
                yield
