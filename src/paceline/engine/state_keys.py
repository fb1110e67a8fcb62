"""Keys of state_dict do not depend on wrapping or compiling.

``wrapper.state_dict()`` has the keys of the module inside: neither ``module.`` (from
wrapping) nor ``_orig_mod.`` (from torch.compile) appears, so a checkpoint written on many
ranks loads into the plain module. ``wrapper.load_state_dict()`` takes all spellings.
"""

from __future__ import annotations

from typing import Any

from torch import nn

WRAPPED = "module."
COMPILED = "_orig_mod."


def use_plain_keys(wrapper: nn.Module) -> None:
    """Give ``wrapper``, whose one child is called ``module``, plain keys in both directions."""
    wrapper.register_state_dict_post_hook(_write_plain_keys)
    wrapper.register_load_state_dict_pre_hook(_accept_any_spelling)


def _write_plain_keys(wrapper: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[_plain(prefix) + _plain(key[len(prefix) :].removeprefix(WRAPPED))] = state.pop(key)
    versions = getattr(state, "_metadata", None)  # versions of the modules' formats, under their own names
    if versions is not None:
        for name in [name for name in versions if (name + ".").startswith(prefix + WRAPPED)]:
            versions.setdefault(
                _plain(prefix + (name + ".")[len(prefix + WRAPPED) :]).rstrip("."), versions[name]
            )


def _accept_any_spelling(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    expected = {_plain(key): key for key in _raw_keys(wrapper)}
    for key in [key for key in state if key.startswith(prefix)]:
        spelling = _plain(key[len(prefix) :])
        if spelling not in expected:
            spelling = spelling.removeprefix(WRAPPED)
        if spelling in expected:
            state[prefix + WRAPPED + expected[spelling]] = state.pop(key)


def _raw_keys(wrapper: nn.Module) -> list[str]:
    return list(wrapper.get_submodule(WRAPPED.rstrip(".")).state_dict())


def _plain(key: str) -> str:
    return key.replace(COMPILED, "")
