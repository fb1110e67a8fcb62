"""Keys of state_dict do not depend on wrapping or compiling.

``wrapper.state_dict()`` has the keys of the module inside: neither ``module.`` (from
wrapping) nor ``_orig_mod.`` (from torch.compile) appears, so a checkpoint written on many
ranks loads into the plain module. ``wrapper.load_state_dict()`` takes all spellings.

Note "who asks for the keys": ``torch.distributed.checkpoint.state_dict`` takes ``module.``
away itself, and insists on finding it in what an instance of torch's class gives. Its
users see plain keys either way, so it gets what it expects.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

WRAPPED = "module."
COMPILED = "_orig_mod."


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` was given, or ``module`` itself if it is not compiled."""
    original = getattr(module, COMPILED.rstrip("."), module)
    return original if isinstance(original, nn.Module) else module


def without_compiler_prefix(name: str) -> str:
    """A parameter's name in a compiled module as its name in the ``uncompiled`` one."""
    return name.removeprefix(COMPILED)


def use_plain_keys(wrapper: nn.Module) -> None:
    """Give ``wrapper``, whose one child is called ``module``, plain keys in both directions."""
    wrapper.register_state_dict_post_hook(_write_plain_keys)
    wrapper.register_load_state_dict_pre_hook(_accept_any_spelling)


def _write_plain_keys(wrapper: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    if _asked_by_torchs_helpers():
        return
    for key in [key for key in state if key.startswith(prefix)]:
        state[_plain(prefix) + _plain(key[len(prefix) :].removeprefix(WRAPPED))] = state.pop(key)
    versions = getattr(state, "_metadata", None)  # versions of the modules' formats, under their own names
    if versions is not None:
        for name in [name for name in versions if (name + ".").startswith(prefix + WRAPPED)]:
            versions.setdefault(
                _plain(prefix + (name + ".")[len(prefix + WRAPPED) :]).rstrip("."), versions[name]
            )


def _asked_by_torchs_helpers() -> bool:
    """Whether ``state_dict`` was called from torch.distributed.checkpoint.state_dict; see the note above."""
    frame = sys._getframe(2)  # our hook's caller: the innermost ``Module.state_dict``
    while frame.f_code is nn.Module.state_dict.__code__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"


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
