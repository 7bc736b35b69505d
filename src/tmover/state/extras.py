"""What modules add to their state_dict beside parameters and buffers.

What `get_extra_state` returns (the scales of a quantizer, counts) is made in each rank's forward,
and may differ by rank: it is each rank's own, as its random streams are. What a module adds by a
`state_dict` or `_save_to_state_dict` of its own is taken to be the same on all ranks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_KEY = "_extra_state"
"""What torch calls it in a state_dict."""


class Extra:
    """What modules return from `get_extra_state`, as one object with a state_dict."""

    def __init__(self, module: nn.Module) -> None:
        kept = nn.Module.get_extra_state
        self._modules = {
            f"{key}.{_KEY}" if key else _KEY: inner
            for key, inner in module.named_modules()
            if type(inner).get_extra_state is not kept
        }

    def __bool__(self) -> bool:
        return bool(self._modules)

    def state_dict(self) -> dict[str, Any]:
        """Return it by name."""
        return {key: module.get_extra_state() for key, module in self._modules.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let every module take its own."""
        for key, value in state.items():
            self._modules[key].set_extra_state(value)


def adds_more(module: nn.Module) -> bool:
    """Return whether a module writes its state_dict in a way of its own."""
    kind = type(module)
    return (
        kind._save_to_state_dict is not nn.Module._save_to_state_dict
        or kind.state_dict is not nn.Module.state_dict
    )


def more(module: nn.Module) -> dict[str, Any]:
    """Return what such modules add, by name."""
    known = {key for key, _ in module.named_parameters(remove_duplicate=False)}
    known |= {key for key, _ in module.named_buffers(remove_duplicate=False)}
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    return {k: v for k, v in state.items() if k not in known and not k.endswith(_KEY)}
