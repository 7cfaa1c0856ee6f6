"""Checks consecutive checkpoints against the formulas of the optimizer, element by element.

The gradient g of an update follows from its moments, m' = b1 m + (1 - b1) g, so no backward is needed:

    adamw   w' = w (1 - lr wd) - lr m'/(1 - b1^t) / (sqrt(v'/(1 - b2^t)) + eps),  v' = b2 v + (1 - b2) g^2
    adam    the same without decay, with g + wd w for g
    sgd     u' = mu u + g + wd w, w' = w - lr u'
    lion    w' = w (1 - lr wd) - lr sign(b1 m + (1 - b1) g), m' = b2 m + (1 - b2) g
    muon    m' = mu m + (1 - mu) g, w' = w (1 - lr wd) - lr scale NS((1 - mu) g + mu m') for matrices, adamw for others
    schedule_free  see `schedule_free`
    clip    |g| over all parameters is min(1, c / (n + 1e-6)) n, where n is the norm that was recorded

Matrices decay, vectors do not, and [[train.groups]] says otherwise by name. Parameters without a gradient keep their
bits: frozen ones, and those that the loss of the plain model does not depend on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from weft.verify.oracle.facts import LoopFacts, Saved, Tables, Tensors
from weft.verify.oracle.schedule import rate_of
from weft.verify.oracle.schedule_free import FreeUpdate
from weft.verify.tolerances import UNIT_ROUNDOFF
from weft.verify.verdict import Check, Finding

NAME, RULE = "oracle update", 12
ROUNDOFF = UNIT_ROUNDOFF["float32"]
# An element may be off by some roundings of its update's operands, and of its weight.
UPDATE_ROUNDINGS, WEIGHT_ROUNDINGS = 256.0, 4.0
# Share of elements that may be off: kernels differ where squares of gradients underflow float32.
ODD_SHARE = 1e-3
# Of the norm of a matrix's change: the steps enlarge the rounding of small singular values up to 500 times.
MUON_TOLERANCE, LOW_MUON_TOLERANCE = 5e-3, 0.1
NORM_TOLERANCE = 1e-3  # gradients are a difference of moments: up to 1/(1 - b1) roundings each


@dataclass(frozen=True, kw_only=True)
class OracleUpdate:
    """One step: the checkpoints before and after it, and the constants."""

    before: Saved
    after: Saved
    step: int  # from 1
    count: int  # updates so far, this one included; steps that float16 skipped are not counted
    train: Tables
    norm: float
    untrained: frozenset[str] = frozenset()  # parameters that get no gradient

    @property
    def rate(self) -> float:
        return rate_of(self.train, self.step)

    def clipped_norm(self) -> float:
        clip = float(self.train["clip_norm"])
        return self.norm * (min(1.0, clip / (self.norm + 1e-6)) if clip > 0 else 1.0)

    def is_frozen(self, name: str) -> bool:
        return name in self.untrained or any(fnmatchcase(name, pattern) for pattern in self.train["frozen"])

    def group(self, name: str) -> Tables:
        """The table of [[train.groups]] that the parameter is in, or none."""
        return next((group for group in self.train["groups"] if fnmatchcase(name, group["pattern"])), {})

    def decay(self, name: str, weight: torch.Tensor) -> float:
        given = self.group(name).get("weight_decay")
        if given is not None:
            return float(given)
        return float(self.train["weight_decay"]) if weight.ndim >= 2 else 0.0

    def rate_of(self, name: str) -> float:
        """The step's rate of a parameter: by its group's own peak, or its ratio to the run's."""
        group, peak = self.group(name), float(self.train["learning_rate"])
        if group.get("learning_rate") is not None:
            return self.rate / peak * float(group["learning_rate"])
        ratio = group.get("learning_rate_ratio")
        return self.rate * (1.0 if ratio is None else float(ratio))


def check_updates(
    train: Tables, initial: Tensors, loop: LoopFacts, *, untrained: frozenset[str] = frozenset()
) -> Check:
    """Check every update of the loop between two consecutive checkpoints, of the parameters in `initial`."""
    if loop.rounded_states or loop.is_delayed:
        why = loop.rounded_states or "updates of a pipeline that never drains overlap"
        return Check.passed(NAME, f"not judged by formulas: {why}")
    judged = []
    before = Saved(weights=initial, states={})
    for step in range(1, len(loop.losses) + 1):
        if step not in loop.saved_steps:
            continue
        after = loop.saved(step)
        if step == 1 or step - 1 in loop.saved_steps:
            count = step - sum(skipped < step for skipped in loop.skipped)  # `skipped` counts from 0
            norm = loop.norms[step - 1]
            update = OracleUpdate(
                before=before, after=after, step=step, count=count, train=train, norm=norm, untrained=untrained
            )
            wrong = _skipped(update, initial) if step - 1 in loop.skipped else _wrong(update, initial)
            if wrong is not None:
                return Check.failed(NAME, wrong)
            judged.append(step)
        before = after
    detail = f"{train['optimizer']} written out, {len(judged)} of {len(loop.losses)} updates, every element"
    return Check.passed(NAME, f"{detail}; clipped to the norm recorded")


def recovered_gradients(update: OracleUpdate, names: Mapping[str, object] | Tensors) -> dict[str, torch.Tensor]:
    """Gradients after clipping, recovered from the optimizer's moments, without the decay that it adds itself."""
    train, found = update.train, {}
    for name in names:
        weight = update.before.weights[name].double()
        if is_matrix(update, name):
            mu, (momentum, before) = float(train["muon_momentum"]), _momenta(update, name)
            found[name] = (momentum - mu * before) / (1.0 - mu)
        elif train["optimizer"] == "schedule_free":
            free = _free(update, name)
            found |= {} if free is None else {name: free.gradient()}
        elif train["optimizer"] == "sgd":
            new, old = _state(update.after, name, "momentum_buffer"), _state(update.before, name, "momentum_buffer")
            if new is None:  # without momentum
                new, old = (weight - update.after.weights[name].double()) / update.rate_of(name), None
            gradient = new - float(train["momentum"]) * (0.0 if old is None else old)
            found[name] = gradient - update.decay(name, weight) * weight
        else:
            new, old = _state(update.after, name, "exp_avg"), _state(update.before, name, "exp_avg")
            if new is None:
                continue
            beta = float(train["betas"][1 if train["optimizer"] == "lion" else 0])
            gradient = (new - beta * (0.0 if old is None else old)) / (1.0 - beta)
            found[name] = gradient - (update.decay(name, weight) * weight if train["optimizer"] == "adam" else 0.0)
    return found


def _wrong(update: OracleUpdate, initial: Tensors) -> Finding | None:
    names = {name: weight for name, weight in initial.items() if not update.is_frozen(name)}
    for name in initial:
        if name not in names and not torch.equal(update.before.weights[name], update.after.weights[name]):
            return _finding(update, name, "a parameter without a gradient keeps its bits", "other bits")
    gradients = recovered_gradients(update, names)
    for name in names:
        expected = _expected(update, name, gradients)
        if expected is None:
            return _finding(update, name, "optimizer states in the checkpoint", "none")
        wrong = _wrong_base(update, name) or _off(update, name, *expected) or _wrong_average(update, name)
        if wrong is not None:
            return wrong
    total = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    expected_norm = update.clipped_norm()
    if not abs(total - expected_norm) <= NORM_TOLERANCE * expected_norm + 1e-12:
        return Finding(
            rule=RULE, step=update.step, coordinates="all gradients, as the optimizer read them",
            expected=f"a norm of {expected_norm:.6g} ({update.norm:.6g} before clipping)", found=f"{total:.6g}",
        )  # fmt: skip
    return None


def _expected(update: OracleUpdate, name: str, gradients: Tensors) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(weight before, expected change); None if states are missing."""
    weight, train, rate = update.before.weights[name].double(), update.train, update.rate_of(name)
    decay = update.decay(name, weight)
    if train["optimizer"] == "sgd":
        buffer = _state(update.after, name, "momentum_buffer")
        if buffer is None:
            buffer = gradients[name] + decay * weight
        return weight, -rate * buffer
    if is_matrix(update, name):
        return weight, _muon(update, name, gradients[name]) - rate * decay * weight
    if train["optimizer"] == "schedule_free":
        free, total = _free(update, name), _state(update.after, name, "weight_sum")
        return None if free is None or total is None else (weight, free.change(weight_sum=float(total)))
    first, second = (float(beta) for beta in train["betas"])
    if train["optimizer"] == "lion":
        return _lion(update, name, gradients[name])
    moment, square = _state(update.after, name, "exp_avg"), _state(update.after, name, "exp_avg_sq")
    if moment is None or square is None:
        return None
    is_coupled = train["optimizer"] == "adam"
    gradient = gradients[name] + (decay * weight if is_coupled else 0.0)
    old = _state(update.before, name, "exp_avg_sq")
    expected_square = second * (0.0 if old is None else old) + (1.0 - second) * gradient.square()
    if not _near(square, expected_square):
        return weight, torch.full_like(weight, math.nan)  # the second moment does not match these gradients
    denominator = (square / (1.0 - second**update.count)).sqrt() + float(train["epsilon"])
    added = -rate * moment / (1.0 - first**update.count) / denominator
    return weight, added - (0.0 if is_coupled else rate * decay * weight)


def _free(update: OracleUpdate, name: str) -> FreeUpdate | None:
    """The update by schedule-free AdamW; None if states are missing."""
    weight, train = update.before.weights[name].double(), update.train
    old, square = _state(update.before, name, "z"), _state(update.before, name, "exp_avg_sq")
    new, new_square = _state(update.after, name, "z"), _state(update.after, name, "exp_avg_sq")
    if new is None or new_square is None:
        return None
    first, second = (float(beta) for beta in train["betas"])
    return FreeUpdate(
        y=weight, z=weight if old is None else old, new_z=new,
        v=torch.zeros_like(weight) if square is None else square, new_v=new_square,
        rate=update.rate_of(name), decay=update.decay(name, weight),
        betas=(first, second), epsilon=float(train["epsilon"]), count=update.count,
    )  # fmt: skip


def _wrong_base(update: OracleUpdate, name: str) -> Finding | None:
    """A wrong step of z, or a wrong sum of squared rates, which weighs it in the average."""
    free = _free(update, name) if update.train["optimizer"] == "schedule_free" else None
    if free is None:
        return None
    odd, old = free.wrong_bases(), _state(update.before, name, "weight_sum")
    if int(odd.sum()) > ODD_SHARE * odd.numel():
        found = f"another: {int(odd.sum())} of {odd.numel()} elements are off"
        return _finding(update, name, "a step of z by the gradient that v shows", found)
    expected, found_sum = (0.0 if old is None else float(old)) + free.rate**2, _state(update.after, name, "weight_sum")
    if found_sum is None or not abs(float(found_sum) - expected) <= 1e-9 * expected:
        return _finding(update, name, f"a sum of squared rates of {expected:.6g}", str(found_sum))
    return None


def _lion(update: OracleUpdate, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_expected`. The sign of a sum that rounding decides is taken from the weights; without a gradient it is 0."""
    weight, old = update.before.weights[name].double(), _state(update.before, name, "exp_avg")
    first, rate = float(update.train["betas"][0]), update.rate_of(name)
    kept = torch.zeros_like(weight) if old is None else first * old
    mixed = kept + (1.0 - first) * gradient
    change = update.after.weights[name].double() - weight + rate * update.decay(name, weight) * weight
    is_open = mixed.abs() <= UPDATE_ROUNDINGS * ROUNDOFF * (kept.abs() + (1.0 - first) * gradient.abs())
    taken = -(change / (rate or 1.0)).round().clamp(-1, 1)  # not the sign: decay leaves a rounding of its own
    sign = torch.where(is_open, taken, mixed.sign())
    return weight, -rate * (sign + update.decay(name, weight) * weight)


def is_matrix(update: OracleUpdate, name: str) -> bool:
    """Whether muon has updated a parameter as a matrix: only those have its momentum."""
    return update.train["optimizer"] == "muon" and _state(update.after, name, "momentum_buffer") is not None


def _momenta(update: OracleUpdate, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    new = update.after.states[f"{name}.momentum_buffer"].double()
    old = _state(update.before, name, "momentum_buffer")
    return new, torch.zeros_like(new) if old is None else old


def _muon(update: OracleUpdate, name: str, gradient: torch.Tensor) -> torch.Tensor:
    """The change of a matrix, or of a stack of them, without decay."""
    mu = float(update.train["muon_momentum"])
    x = (1.0 - mu) * gradient + mu * _momenta(update, name)[0]
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ (gram @ x)
    rows, columns = x.shape[-2:]
    scale = 0.2 * math.sqrt(max(rows, columns))
    if update.train["muon_scale"] == "original":
        scale = math.sqrt(max(1.0, rows / columns))
    change: torch.Tensor = -update.rate_of(name) * scale * x
    return change


def _near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= NORM_TOLERANCE * expected.norm() + 1e-30)


def _off(update: OracleUpdate, name: str, weight: torch.Tensor, added: torch.Tensor) -> Finding | None:
    found = update.after.weights[name].double()
    if added.isnan().any():
        return _finding(update, name, "a second moment of the gradients that the first one shows", "another")
    if is_matrix(update, name):  # each element of a product of matrices has the rounding of all
        is_low = update.train["muon_precision"] != "float32" and (
            torch.cuda.is_available() or update.train["muon_precision"] == "bfloat16"
        )
        off, size = float((found - weight - added).norm()), float(added.norm()) + ROUNDOFF * float(weight.norm())
        if off <= (LOW_MUON_TOLERANCE if is_low else MUON_TOLERANCE) * size:
            return None
        return _finding(update, name, f"the update of the whole matrix, of norm {size:.3g}", f"off by {off:.3g}")
    allowed = UPDATE_ROUNDINGS * ROUNDOFF * added.abs() + WEIGHT_ROUNDINGS * ROUNDOFF * weight.abs() + 1e-30
    gap = (found - weight - added).abs()
    odd = ~(gap <= allowed)  # NaN is never within a bound
    if int(odd.sum()) <= ODD_SHARE * odd.numel():
        return None
    at = int((gap / allowed).nan_to_num(nan=math.inf).argmax())
    place = f"element {at} of {odd.numel()}, {int(odd.sum())} are off"
    expected, value = (added.flatten()[at].item(), (found - weight).flatten()[at].item())
    return _finding(
        update, name, f"an update of {expected:.6g} ({update.train['optimizer']})", f"{value:.6g}", place=place
    )


def _wrong_average(update: OracleUpdate, name: str) -> Finding | None:
    """The average is decay x the one before (at first the initial weight) + (1 - decay) x the weight after."""
    decay = float(update.train["ema_decay"])
    found, old = _state(update.after, name, "ema"), _state(update.before, name, "ema")
    if not decay:
        return None
    if found is None:
        return _finding(update, name, "an average of the weights in the checkpoint", "none")
    before, after = update.before.weights[name].double(), update.after.weights[name].double()
    expected = decay * (before if old is None else old) + (1.0 - decay) * after
    gap = float((found - expected).norm())
    if gap <= UPDATE_ROUNDINGS * ROUNDOFF * float(expected.norm()) + 1e-30:
        return None
    return _finding(update, name, "the average of the weights after this update", f"off by {gap:.3g}")


def _skipped(update: OracleUpdate, initial: Tensors) -> Finding | None:
    for name in initial:
        if not torch.equal(update.before.weights[name].float(), update.after.weights[name].float()):
            return _finding(update, name, "a step that overflowed changes nothing", "other values")
    return None


def _state(saved: Saved, name: str, key: str) -> torch.Tensor | None:
    value = saved.states.get(f"{name}.{key}")
    return None if value is None else value.double()


def _finding(update: OracleUpdate, name: str, expected: str, found: str, *, place: str | None = None) -> Finding:
    return Finding(rule=RULE, step=update.step, parameter=name, coordinates=place, expected=expected, found=found)
