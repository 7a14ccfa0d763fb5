"""The front door: ``foretoken.load(...)`` gives an :class:`Llm` that generates and streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import torch

from foretoken.controllers.base import Controller
from foretoken.drafters.base import Drafter
from foretoken.engine.loop import Engine
from foretoken.engine.request import Emission, Origin, Request, Running
from foretoken.engine.stats import SpecStats
from foretoken.engine.stopping import Detokenizer, FinishReason
from foretoken.loading import BUILTIN, build_drafter, default_drafter, load_model, load_tokenizer, read_profile
from foretoken.loading.memory import told_when_full
from foretoken.models.base import LanguageModel
from foretoken.models.graphs import with_graphs
from foretoken.noise import samples_of, seeds_of
from foretoken.registry import make
from foretoken.sampling import LogitsProcessor, SamplingParams
from foretoken.verifiers.base import Verifier

Prompt = str | Sequence[int]


@dataclass
class Output:
    """One finished generation.

    Attributes:
        text: the new text (cut before a stop string, special tokens left out).
        token_ids: the new tokens only.
        finish_reason: ``eos``, ``stop`` or ``length``.
        stats: counts and times.
        origins: per token, whether it was an accepted draft token, a recovered, a bonus or a plainly decoded one.
        seed: of a sampled output, the given one or one that was drawn; ``None`` for a greedy output.  Asked for with
            this seed, an output that was coupled (all seeded ones, unless another verifier was named) comes again.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: SpecStats
    origins: list[Origin] = field(default_factory=list)
    seed: int | None = None


@dataclass
class Piece:
    """A part of a stream: what one round added.

    Attributes:
        text: new text that is certain (may be empty while a character is half-written).
        token_ids: new tokens.
        accepted: per token, whether it was an accepted draft token.
        origins: per token, where it came from.
        finish_reason: set on the last piece.
        stats: set on the last piece.
        seed: as in :class:`Output`, on the last piece.
    """

    text: str
    token_ids: list[int]
    accepted: list[bool]
    origins: list[Origin]
    finish_reason: FinishReason | None = None
    stats: SpecStats | None = None
    seed: int | None = None


class Llm:
    """A target, a drafter, a verifier and a controller, ready to generate.  Made by :func:`load`."""

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        verifier: Verifier | None,
        controller: Controller | None,
        tokenizer: Any | None,
        *,
        allow_lossy: bool = False,
    ) -> None:
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.engine = Engine(target, drafter, verifier, controller, tokenizer=tokenizer, allow_lossy=allow_lossy)
        self._boxes: dict[int, deque[tuple[Running, Emission]]] = {}

    # -- generation --------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompts: str | list[int], **options: Any) -> Output: ...
    @overload
    def generate(self, prompts: list[str] | list[list[int]], **options: Any) -> list[Output]: ...
    def generate(self, prompts: Any, *, n: int = 1, **options: Any) -> Any:
        """Generate for one prompt (text or ids) or a list of them; see :meth:`request` for the options.

        A list is served as one batch.  ``seed`` and ``prediction`` may then be lists too, one per prompt; one seed for
        a list is every prompt's.

        Args:
            prompts: text, token ids, or a list of either.
            n: samples per prompt.  Above 1 the result is a list of them for every prompt; sample i has the prompt's
                seed plus i, if there is one, so that it can be asked for alone.
            options: of :meth:`request`.

        Raises:
            ValueError: ``n`` below 1, or above 1 at temperature 0, or a list of seeds of another length than the
                prompts'; and what :meth:`request` refuses.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n}")
        if n > 1 and not options.get("temperature"):
            raise ValueError(f"n={n} needs temperature > 0: at temperature 0 all samples are the same")
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        batch: Sequence[Prompt] = [prompts] if single else prompts
        if not single and not batch:
            return []
        predictions = options.pop("prediction", None)
        requests = [
            self.request(p, seed=seed, prediction=_prediction_of(predictions, i, single), **options)
            for i, (p, given) in enumerate(zip(batch, seeds_of(options.pop("seed", None), len(batch)), strict=True))
            for seed in samples_of(given, n)
        ]
        outputs = self._run(requests)
        if n > 1:
            found = [outputs[i : i + n] for i in range(0, len(outputs), n)]
            return found[0] if single else found
        return outputs[0] if single else outputs

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Piece]:
        """Generate for one prompt, yielding a piece per round."""
        request = self.request(prompt, **options)
        request_id = self._enter(request)
        text = Detokenizer(self.tokenizer)
        shown = ""
        try:
            while True:
                run, emission = self._next(request_id)
                text.push(emission.token_ids)
                piece = self._piece(run, emission, text, shown)
                shown += piece.text
                yield piece
                if emission.finish_reason is not None:
                    return
        finally:
            self._exit(request_id)

    # A stream may be read between the rounds of another one or of a ``generate``: every round serves all of them, so
    # what each gained waits in a box of its own until it is asked for.

    def _enter(self, request: Request) -> int:
        request_id = self.engine.add(request)
        self._boxes[request_id] = deque()
        return request_id

    def _exit(self, request_id: int) -> None:
        self._boxes.pop(request_id, None)
        self.engine.cancel(request_id)

    def _next(self, request_id: int) -> tuple[Running, Emission]:
        """What a request gained in its next round."""
        box = self._boxes[request_id]
        while not box:
            if not self.engine.holds(request_id):
                raise RuntimeError("the request was dropped when a round was broken off: ask again")
            for run, emission in self.engine.step():
                if run.id in self._boxes:
                    self._boxes[run.id].append((run, emission))
        return box.popleft()

    def _piece(self, run: Running, emission: Emission, text: Detokenizer, shown: str) -> Piece:
        final = emission.finish_reason is not None
        if final:
            text.flush()
            whole = text.text if run.stopper.cut is None else self._cut(run, text.text)
            new = whole[len(shown) :]
        else:
            # Text that may still turn out to be the beginning of a stop string is held back.
            end = len(text.text) - max(0, run.stopper.held_back - 1)
            new = text.text[len(shown) : max(end, len(shown))]
        accepted = [origin == "accepted" for origin in emission.origins]
        return Piece(
            new,
            list(emission.token_ids),
            accepted,
            list(emission.origins),
            emission.finish_reason,
            run.stats if final else None,
            run.seed if final else None,
        )

    @staticmethod
    def _cut(run: Running, text: str) -> str:
        return text if run.stopper.cut is None else text[: run.stopper.cut]

    def request(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        logits_processor: Sequence[LogitsProcessor] = (),
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        prediction: Prompt | None = None,
        ignore_eos: bool = False,
    ) -> Request:
        """A checked request.

        Args:
            prompt: text, or token ids.
            max_new_tokens: most output tokens.
            temperature: 0 is greedy.
            top_k: keep the k most likely tokens (0: all).
            top_p: nucleus mass in (0, 1].
            min_p: drop tokens below this fraction of the most likely one.
            repetition_penalty: > 1 discourages tokens of the prompt and output.
            presence_penalty: subtracted from tokens of the output.
            frequency_penalty: subtracted per occurrence in the output.
            logit_bias: added to single tokens' logits.
            logits_processor: Transformers ``LogitsProcessor`` objects.
            stop: string or strings that end the text.
            seed: fixes sampled output, whatever drafts and whatever else is in the batch: the output of plain decoding
                with this seed, up to rounding.  From 0 to 2**64 - 1.
            prediction: text or ids expected in the answer, for drafters that use it.
            ignore_eos: go on after an end-of-text id.

        Raises:
            ValueError: any of them out of range.
        """
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=dict(logit_bias or {}),
            processors=tuple(logits_processor),
        )
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        expected = self._encode_prediction(prediction)
        return Request(self.encode(prompt), params, max_new_tokens, stops, seed, expected, ignore_eos)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ValueError: text without a tokenizer, or an empty prompt.
        """
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer: pass tokenizer=... to load, or give token ids")
        ids: list[int] = self.tokenizer(prompt)["input_ids"]
        if not ids:
            raise ValueError("the prompt is empty: give at least one character")
        return ids

    def _encode_prediction(self, prediction: Prompt | None) -> list[int] | None:
        """Ids of a predicted text: no special tokens, and nothing predicted is no prediction."""
        if not prediction:
            return None
        if not isinstance(prediction, str):
            return list(prediction)
        if self.tokenizer is None:
            raise ValueError("a text prediction needs a tokenizer: pass tokenizer=... to load, or give token ids")
        ids: list[int] = self.tokenizer(prediction, add_special_tokens=False)["input_ids"]
        return ids or None

    def _run(self, requests: Sequence[Request]) -> list[Output]:
        ids: list[int] = []
        done: dict[int, Running] = {}
        try:
            ids.extend(self._enter(request) for request in requests)
            for request_id in ids:
                while request_id not in done:
                    run, emission = self._next(request_id)
                    if emission.finish_reason is not None:
                        done[request_id] = run
        finally:
            for request_id in ids:
                self._exit(request_id)
        return [self._output(done[request_id]) for request_id in ids]

    def _output(self, run: Running) -> Output:
        text = ""
        if self.tokenizer is not None:
            decoder = Detokenizer(self.tokenizer)
            decoder.push(run.output)
            decoder.flush()
            text = self._cut(run, decoder.text)
        if run.finish_reason is None:
            raise RuntimeError("an unfinished request has no output")
        return Output(text, run.output, run.finish_reason, run.stats, list(run.origins), run.seed)

    @property
    def plain(self) -> Llm:
        """The same target without speculation (shares the model, not the requests)."""
        return Llm(self.target, None, None, None, self.tokenizer)


def _prediction_of(value: Any, index: int, single: bool) -> Any:
    if value is None or single or isinstance(value, str) or (len(value) > 0 and isinstance(value[0], int)):
        return value
    return value[index]


@told_when_full
def load(
    target: Any = BUILTIN,
    drafter: str | Drafter | Sequence[str | Drafter] | None = "auto",
    verifier: str | Verifier = "auto",
    controller: str | Controller = "auto",
    *,
    tokenizer: Any | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    allow_lossy: bool = False,
    exact: str = "distribution",
    profile: str | Path | None = None,
    inflate: str | int | None = None,
    pack: bool | str = "auto",
    quantize: str | None = None,
    graphs: bool | str = "auto",
) -> Llm:
    """Load a target and everything around it.

    Args:
        target: ``"builtin"``, ``"builtin:early_exit"`` (trained for early exits), ``"builtin:hybrid"`` (with recurrent
            layers and an MTP head of its own), the path of a model, of a low-rank update of one or of a GGUF file, a
            hub id, a ``PreTrainedModel`` or a :class:`LanguageModel`.
        drafter: a spec string (``"ngram,n=3,k=8"``, ``"model:./draft,k=5"``), a drafter, a list of them (an
            ensemble), ``None`` for plain decoding, or ``"auto"``.
        verifier: a name, a verifier, or ``"auto"`` for the best lossless rule.
        controller: a spec string, a controller, or ``"auto"``.
        tokenizer: a Transformers tokenizer; found beside the target by default.
        dtype: ``float32``, ``float64``, ``bfloat16``, ``float16``; the checkpoint's by default.
        device: where the models run: ``cpu``, ``cuda``, ``cuda:1``, ``mps``, or ``"auto"`` for the first of cuda, mps
            and cpu that there is.  By default the cpu, or where a handed-in model is; draft models go where the target
            is.
        allow_lossy: permit verifiers that change the target's law.
        exact: ``"distribution"`` or ``"bitwise"`` (slower; sums do not depend on how many tokens are scored together:
            a bfloat16 target then gives the same tokens with and without speculation).
        profile: a JSON file with ``drafter``, ``verifier`` and ``controller`` specs for what is left at ``"auto"``, and
            with the costs that ``foretoken tune`` measured.
        inflate: for benchmarks, make the target one of this size (``"300m"``, ``"1b"``, ``"3b"``, ``"7b"``, or a number
            of parameters) with the outputs that it had.
        pack: whether linear layers may be laid out anew, in place, where this machine multiplies them faster so
            (measured once per machine, see ``docs/packing.md``): by default those of models that are loaded here;
            ``True``: also those of a model that is handed in (``llm.target.unpack()`` takes it back); ``False``: none.
        quantize: ``"int8"`` or ``"int4"``: quantise the weights of a target that is loaded, on the CPU.  A quantised
            target has a distribution of its own, which speculation keeps.
        graphs: run the target and its draft model as CUDA graphs (:mod:`foretoken.models.graphs`): ``"auto"`` where
            they are on a CUDA device and a check at load passes, ``True`` (an error where that cannot be), ``False``.

    Warns:
        ProfileWarning: the profile was measured with another target or on another machine.

    Raises:
        LoadError: a checkpoint is missing, damaged or pickled, or the device is full.
        ValueError: an unknown name, option or device, graphs that cannot be had, a bad profile, or parts that do not
            fit each other.
    """
    tuned = {} if profile is None else read_profile(profile)
    if tuned:
        drafter = tuned.get("drafter", drafter) if _is_auto(drafter) else drafter
        verifier = tuned.get("verifier", verifier) if _is_auto(verifier) else verifier
        controller = tuned.get("controller", controller) if _is_auto(controller) else controller
    model = load_model(target, dtype=dtype, device=device, exact=exact, inflate=inflate, pack=pack, quantize=quantize)
    if model is not target or graphs != "auto":  # a language model that is handed in stays as it is
        model = with_graphs(model, graphs)
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(target)
    spec = default_drafter(model, target) if isinstance(drafter, str) and drafter == "auto" else drafter
    beside = None if str(device) == "auto" else device  # the target's own, wherever that turned out to be
    built = build_drafter(spec, model, target_source=target, tokenizer=tokenizer, device=beside)
    llm = assemble(model, built, verifier, controller, tokenizer, allow_lossy=allow_lossy)
    if profile is not None:
        _start_from(llm, tuned, profile)
    return llm


def _start_from(llm: Llm, tuned: Mapping[str, Any], profile: str | Path) -> None:
    """Hand a profile's costs to a controller that uses them."""
    from foretoken.analysis.profile import costs_for

    controller = llm.engine.controller
    wanted = controller is not None and type(controller).start_from is not Controller.start_from
    costs = costs_for(tuned, llm.target, profile, wanted)
    if controller is not None and costs is not None:
        controller.start_from(costs)


def _is_auto(choice: Any) -> bool:
    return isinstance(choice, str) and choice == "auto"


def assemble(
    target: LanguageModel,
    drafter: Drafter | None,
    verifier: str | Verifier,
    controller: str | Controller,
    tokenizer: Any | None,
    *,
    allow_lossy: bool = False,
) -> Llm:
    """An :class:`Llm` from loaded models; verifier and controller may still be specs.

    Raises:
        ValueError: an unknown name or option, or parts that do not fit each other.
    """
    chosen_verifier = (
        None if verifier == "auto" else make("verifier", verifier) if isinstance(verifier, str) else verifier
    )
    chosen_controller = make("controller", controller) if isinstance(controller, str) else controller
    return Llm(
        target,
        drafter,
        chosen_verifier,
        chosen_controller if drafter is not None else None,
        tokenizer,
        allow_lossy=allow_lossy,
    )
