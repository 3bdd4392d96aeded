"""The compact state of a captured prompt: pages, recurrent state, gradient sinks, witness, files. Knows no model."""

from longstraw_core.resident.identity import PrefixIdentity, prompt_token_digest
from longstraw_core.resident.prefix_state import PrefixState

__all__ = ["PrefixIdentity", "PrefixState", "prompt_token_digest"]
