"""Bayesian optimisation of the sublayers that a target skips when it drafts for itself, by measured tokens per second.

Draft & Verify, Zhang et al. 2023 (arXiv 2309.08168).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.io.files import checksum
from foretoken.lab.workload import Speed, Workload, compared_speeds
from foretoken.methods.drafters.layer_skip import LayerSkipDrafter
from foretoken.methods.drafters.own_layers import num_layers_of
from foretoken.methods.drafters.skip_sets import SkipSet, fingerprint, save_skips

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

SUBLAYERS = ("attention", "mlp")


def measured(work: Workload, k: int, skips: SkipSet | None) -> Speed:
    """Decode all prompts once, plainly or with drafts of up to ``k`` tokens that skip ``skips``."""
    if skips is None:
        return work.speed(None)
    return work.speed(LayerSkipDrafter(work.target, skips.options["attention"], skips.options["mlp"], k))


def settings_of(work: Workload, k: int) -> dict[str, Any]:
    """Settings that all parts of one search must share."""
    return {
        "target": fingerprint(work.target),
        "prompts": checksum(json.dumps([list(prompt) for prompt in work.prompts])),
        "new_tokens": work.new_tokens,
        "k": k,
        "temperature": work.temperature,
    }


class LayerSkipStudy:
    """A search whose trials are stored for resuming.

    Raises ``ValueError`` for trials of another search, or if there are trials and ``resume`` is false.

    Args:
        file: written with the best set after every improvement.
        resume: continue with the trials of ``journal``.

    Attributes:
        journal: the file of all trials.
        num_before: number of earlier trials.
        best, best_speed: the best set, and its tokens per second in its trial.
    """

    def __init__(self, work: Workload, k: int, file: Path, resume: bool) -> None:
        optuna = _optuna()
        self.work, self.k, self.file = work, k, file
        self.journal = file.with_name(file.name + ".study")
        self.best: SkipSet | None = None
        self.best_speed = 0.0
        self._layers = num_layers_of(work.target)
        self._study, trials = self._open(optuna)
        self.num_before = len(trials)
        if trials and not resume:
            raise ValueError(
                f"{self.journal} holds {len(trials)} trials: add --resume to continue, or delete it to start anew"
            )
        settings = settings_of(work, k)
        if trials and self._study.user_attrs.get("settings") != settings:
            raise ValueError(f"{self.journal} is from a search with another target, other prompts or other options")
        self._study.set_user_attr("settings", settings)
        # A new seed for every part of a search: the same one would repeat the random sets.
        self._study.sampler = optuna.samplers.TPESampler(seed=work.seed + len(self._study.trials))
        tried = [(_set_of(trial.params), trial.value or 0.0) for trial in trials]
        with _errors_only(optuna):  # it tells of every set that a resumed study has queued already
            for skips in first_sets(self._layers):
                if skips not in dict(tried):
                    self._study.enqueue_trial(_params_of(skips, self._layers), skip_if_exists=True)
        for skips, speed in tried:
            self._keep(skips, speed)

    def _open(self, optuna: Any) -> tuple[Study, list[FrozenTrial]]:
        """The study of the journal, and its finished trials.  Raises ``ValueError`` for a damaged journal."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        try:
            backend = optuna.storages.journal.JournalFileBackend(str(self.journal))
            with _errors_only(optuna):
                study = optuna.create_study(
                    study_name="layer-skip",
                    storage=optuna.storages.JournalStorage(backend),
                    direction="maximize",
                    load_if_exists=True,
                )
            return study, [trial for trial in study.trials if trial.value is not None]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.journal} is damaged ({error}): delete it to start anew") from None

    def _keep(self, skips: SkipSet, speed: float) -> bool:
        if speed <= self.best_speed:
            return False
        self.best, self.best_speed = skips, speed
        return True

    def step(self) -> float:
        """Try one more set; returns its tokens per second (0 for a set that skips all sublayers)."""
        trial = self._study.ask()
        names = [f"{kind}.{layer}" for kind in SUBLAYERS for layer in range(self._layers)]
        skips = _set_of({name: trial.suggest_categorical(name, [False, True]) for name in names})
        empty = len(skips.attention) == len(skips.mlp) == self._layers
        speed = 0.0 if empty else measured(self.work, self.k, skips).tokens_per_s
        self._study.tell(trial, speed)
        if self._keep(skips, speed):
            save_skips(self.file, skips, self.work.target, tokens_per_s=speed)
        return speed


def first_sets(num_layers: int) -> list[SkipSet]:
    """The first sets: both sublayers of every second layer, their attentions alone, their MLPs alone, and all
    attentions except in the first and last layer."""
    default = SkipSet.odd(num_layers)
    middle = frozenset(range(1, num_layers - 1))
    sets = [default, SkipSet(attention=default.attention), SkipSet(mlp=default.mlp), SkipSet(attention=middle)]
    return list(dict.fromkeys(sets))


def _params_of(skips: SkipSet, layers: int) -> dict[str, bool]:
    return {f"{kind}.{layer}": layer in getattr(skips, kind) for kind in SUBLAYERS for layer in range(layers)}


def _set_of(params: dict[str, Any]) -> SkipSet:
    chosen = [name.split(".") for name, skipped in params.items() if skipped]
    attention, mlp = (frozenset(int(layer) for kind, layer in chosen if kind == name) for name in SUBLAYERS)
    return SkipSet(attention, mlp)


def _optuna() -> Any:
    try:
        import optuna
        import optuna.storages.journal
    except ImportError:
        raise ValueError("tuning needs optuna: pip install 'foretoken[tune]'") from None
    return optuna


@contextmanager
def _errors_only(optuna: Any) -> Iterator[None]:
    """Silence optuna's log messages except errors."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


@dataclass(frozen=True)
class TunedSkips:
    """The final interleaved comparison of plain decoding, the ``default`` set (both sublayers of every second layer)
    and the best set.

    ``default`` is ``chosen`` if the best trial was luck.
    """

    trials: int
    plain: Speed
    sets: dict[str, SkipSet]
    speeds: dict[str, Speed]
    chosen: str

    def speedup(self, name: str) -> float:
        """Tokens per second of a set over those of plain decoding."""
        return self.speeds[name].tokens_per_s / self.plain.tokens_per_s

    def public(self) -> dict[str, Any]:
        """Fields of the CLI's JSON."""
        arms = {
            name: {
                "attention": sorted(skips.attention),
                "mlp": sorted(skips.mlp),
                **asdict(self.speeds[name]),
                "speedup": self.speedup(name),
            }
            for name, skips in self.sets.items()
        }
        return {"trials": self.trials, "chosen": self.chosen, "plain": asdict(self.plain), **arms}


def tune(
    work: Workload,
    k: int,
    file: Path,
    trials: int,
    resume: bool = False,
    on_trial: Callable[[int, float, LayerSkipStudy], None] = lambda number, speed, search: None,
) -> TunedSkips:
    """Search for the fastest set, compare it with the default set and plain decoding, and write the faster set to
    ``file``.

    Raises ``CapabilityError`` if the target's layers cannot be run separately, and ``ValueError`` as
    :class:`LayerSkipStudy` does.

    Args:
        file: for ``layer_skip:FILE``; written after every improvement, so that an interrupt loses nothing.
        trials: total number of sets, including those of a resumed search.
        on_trial: called with the number of trials, the last one's tokens per second and the search.
    """
    if trials < 1:
        raise ValueError(f"tuning needs at least 1 trial, not {trials}")
    if file.is_dir():
        raise ValueError(f"{file} is a folder: name a file for the result")
    layers = frozenset(range(num_layers_of(work.target)))
    for skips in (SkipSet(attention=layers), SkipSet(mlp=layers)):
        skips.check(work.target)
    search = LayerSkipStudy(work, k, file, resume)
    default = SkipSet.odd(len(layers))
    measured(work, k, None)  # warm-up: first calls are slower
    measured(work, k, default)
    on_trial(search.num_before, search.best_speed, search)
    for number in range(search.num_before, trials):
        on_trial(number + 1, search.step(), search)
    return _finish(search, {"default": default, "best": search.best or default}, max(search.num_before, trials))


def _finish(search: LayerSkipStudy, sets: dict[str, SkipSet], trials: int) -> TunedSkips:
    plain, speeds = compare(search.work, search.k, sets)
    chosen = max(sets, key=lambda name: (speeds[name].tokens_per_s, name == "default"))
    outcome = TunedSkips(trials, plain, sets, speeds, chosen)
    save_skips(
        search.file,
        sets[chosen],
        search.work.target,
        **asdict(speeds[chosen]),
        speedup=outcome.speedup(chosen),
        plain_tokens_per_s=plain.tokens_per_s,
        **{name: value for name, value in settings_of(search.work, search.k).items() if name != "target"},
    )
    return outcome


def compare(work: Workload, k: int, sets: dict[str, SkipSet]) -> tuple[Speed, dict[str, Speed]]:
    """Speeds of plain decoding and every set, interleaved in rotating order."""
    arms: dict[str, SkipSet | None] = {"plain": None, **sets}
    speeds = compared_speeds({name: partial(measured, work, k, skips) for name, skips in arms.items()})
    return speeds.pop("plain"), speeds
