"""Functions of torch that are replaced before a script starts: calls of modules, `backward`, clipping, data loaders.

The script itself is unchanged. Dropout is off: its masks follow the rows of a process, so no two layouts could agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from weft.verify.script.recorder import ScriptRecorder

_DROPOUTS = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")


def install_hooks(recorder: ScriptRecorder) -> None:
    """Replace the functions for the rest of this process."""
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: recorder.before_step(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: recorder.after_step(optimizer))
    _record_calls(recorder)
    _record_backward(recorder)
    _record_clipping(recorder)
    _disable_dropout(recorder)
    _scale_loaders(recorder)


def _record_calls(recorder: ScriptRecorder) -> None:
    original: Callable[..., Any] = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or recorder.is_backward:  # a recomputed block is no forward of the model
            return original(module, *args, **kwargs)
        with recorder.forward(module, args, kwargs):
            output = original(module, *args, **kwargs)
        recorder.note_output(output)
        return output

    nn.Module.__call__ = call  # type: ignore[method-assign]


def _record_backward(recorder: ScriptRecorder) -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        with recorder.backward(tensors):
            original(tensors, *args, **kwargs)

    torch.autograd.backward = backward


def _record_clipping(recorder: ScriptRecorder) -> None:
    """Gradients are recorded before they are clipped: a clipped norm hides a wrong scale."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        original = getattr(torch.nn.utils, name)

        def clip(parameters: Any, *args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            recorder.note_gradients(given)
            return original(given, *args, **kwargs)

        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            setattr(module, name, functools.wraps(original)(clip))


def _disable_dropout(recorder: ScriptRecorder) -> None:
    functional = torch.nn.functional
    for name in _DROPOUTS:
        original = getattr(functional, name)

        def dropout(
            input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False,
            original: Callable[..., Any] = original,
        ) -> Any:  # fmt: skip
            recorder.trace.has_dropout |= bool(training and p > 0)
            return original(input, 0.0, training, inplace)

        setattr(functional, name, functools.wraps(original)(dropout))
    attention = functional.scaled_dot_product_attention

    def without_dropout(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dropout_p"):
            recorder.trace.has_dropout = True
            kwargs["dropout_p"] = 0.0
        elif len(args) > 4 and args[4]:
            recorder.trace.has_dropout = True
            args = (*args[:4], 0.0, *args[5:])
        return attention(*args, **kwargs)

    functional.scaled_dot_product_attention = without_dropout


def _scale_loaders(recorder: ScriptRecorder) -> None:
    """Batches of `batch_scale` times the size: one process then has the rows of that many ranks.

    A batch sampler is scaled once, however many loaders share it (accelerate makes a second one)."""
    original = DataLoader.__init__
    scaled: list[Any] = []

    @functools.wraps(original)
    def initialise(loader: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
        recorder.trace.has_loader = True
        sampler: Any = kwargs.get("batch_sampler")
        if recorder.batch_scale > 1 and sampler is None and batch_size is not None:
            batch_size *= recorder.batch_scale
        elif (
            recorder.batch_scale > 1 and hasattr(sampler, "batch_size") and not any(each is sampler for each in scaled)
        ):
            sampler.batch_size *= recorder.batch_scale
        original(loader, dataset, batch_size, *args, **kwargs)
        scaled.append(loader.batch_sampler)

    setattr(DataLoader, "__init__", initialise)  # noqa: B010
