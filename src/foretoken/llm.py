"""The main interface: ``foretoken.load(...)`` returns an :class:`Llm` that generates and streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Unpack, overload

import torch

from foretoken.core.conversation import Message, conversations_of, render_with, turn_ends
from foretoken.core.noise import samples_of, seeds_of
from foretoken.core.prompts import prompts_of
from foretoken.core.values import check_flags, check_whole, numbered
from foretoken.engine.calls import Calls
from foretoken.engine.drafting import described
from foretoken.engine.errors import blaming
from foretoken.engine.loop import Engine
from foretoken.engine.output import Output as Output
from foretoken.engine.output import Piece as Piece
from foretoken.engine.output import Pieces, outputs_of
from foretoken.engine.request import Request
from foretoken.loading import (
    BUILTIN,
    Part,
    build_controller,
    build_drafter,
    check_specs,
    check_tokenizer,
    default_drafter,
    load_model,
    load_tokenizer,
)
from foretoken.loading import read_profile as read_profile
from foretoken.loading.generation_defaults import GenerationDefaults, read_defaults
from foretoken.loading.measured.calibration import calibrated
from foretoken.loading.measured.profile import costs_for
from foretoken.loading.memory import explains_full_memory
from foretoken.loading.models import closed_on_error
from foretoken.methods.controllers.base import Controller
from foretoken.methods.drafters.base import Drafter
from foretoken.methods.verifiers.base import Verifier
from foretoken.models.base import LanguageModel
from foretoken.models.forward.graphed import with_graphs
from foretoken.options import BatchOptions, Options, Prompt, beside, encode, make_request, predictions_of, reusable
from foretoken.registry import make


class Llm:
    """A target, a drafter, a verifier and a controller, ready to generate. Created by :func:`load`.

    Several threads may use one :class:`Llm`: they take turns between rounds, and one round serves the requests of all.
    :class:`foretoken.AsyncLlm` batches requests independently of the callers' threads; the :class:`Llm` may still be
    called directly.

    The target's network may change between two requests (training steps, ``load_state_dict``, adapters, ``to``, hooks,
    forwards; :class:`~foretoken.models.network.watch.Watch` lists undetected changes). A change is detected when a
    request begins, which uses the changed network, and when one ends, as an error of the running requests. Weights of
    packed layers (checkpoints on a CPU) are read-only copies: ``llm.target.unpack()`` makes them ordinary parameters.

    Args:
        target: the target model.
        drafter: the drafter, or ``None``.
        verifier: the acceptance rule, or ``None`` for the best lossless one.
        controller: the policy for draft lengths.
        tokenizer: a Transformers tokenizer, or ``None`` (token ids only).
        allow_lossy: permit a verifier that changes the target's distribution.
        prefix_bytes: size of the prefix cache.

    Attributes:
        defaults: the model's default sampling options, for requests that leave them out.
        calls: the calls that share the engine, with their output.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        verifier: Verifier | None,
        controller: Controller | None,
        tokenizer: Any | None,
        *,
        allow_lossy: bool = False,
        prefix_bytes: int = 0,
    ) -> None:
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.defaults = GenerationDefaults()
        settings: dict[str, Any] = {"tokenizer": tokenizer, "allow_lossy": allow_lossy, "prefix_bytes": prefix_bytes}
        self.engine = Engine(target, drafter, verifier, controller, **settings)
        self.calls = Calls(self.engine)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Llm cannot be copied or pickled: load it in each process")

    # -- generation --------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompts: Prompt, **options: Unpack[Options]) -> Output: ...
    @overload
    def generate(self, prompts: Prompt, *, n: int, **options: Unpack[BatchOptions]) -> list[Output]: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[list[dict[str, Any]]],
        *,
        n: int = 1,
        **options: Unpack[BatchOptions],
    ) -> list[Output]: ...
    def generate(self, prompts: Any, *, n: int = 1, **options: Any) -> Any:
        """Generate for one prompt (text, ids or messages) or several; see :class:`foretoken.options.Options`.

        A list is served as one batch. ``seed`` and ``prediction`` may then be lists too, one per prompt; a single seed
        applies to every prompt.

        Args:
            prompts: text, token ids or a list of messages; or a list of such prompts.  A tensor, an array or a
                tokenizer's output is one prompt if it has one row.
            n: samples per prompt. Above 1 the result is a list of them for every prompt; sample i has the prompt's
                seed, if any, plus i, so that it can be requested alone.
            options: of every request; ``seed`` and ``prediction`` may be lists.

        Raises:
            ValueError: ``n`` below 1, or above 1 at temperature 0, or a wrong number of seeds; and as for
                :meth:`request`.
            Exception: a request failed, for example in a drafter from outside (a ``ValueError``). The others are
                finished: ``error.outputs`` is the flat list of outputs, with ``None`` for those that failed.
        """
        check_whole("n", n)
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n}")
        if n > 1 and not options.get("temperature", self.defaults.sampling.get("temperature")):
            raise ValueError(f"n={n} needs temperature > 0: at temperature 0 all samples are the same")
        batch, single = prompts_of(prompts, self.tokenizer)
        if not single and not batch:
            return []
        seeds = seeds_of(options.pop("seed", None), len(batch))
        predictions = predictions_of(options.pop("prediction", None), len(batch), single)
        options = reusable(options)
        requests = []
        for i, prompt in enumerate(batch):
            with numbered(i, len(batch)):
                for seed in samples_of(seeds[i], n):
                    requests.append(self.request(prompt, seed=seed, prediction=predictions[i], **options))
                if len(batch) > 1:
                    self.engine.check(requests[-1])
        outputs = self._run(requests)
        if n > 1:
            samples = [outputs[i : i + n] for i in range(0, len(outputs), n)]
            return samples[0] if single else samples
        return outputs[0] if single else outputs

    @overload
    def chat(self, messages: Sequence[Message], **options: Any) -> Output: ...
    @overload
    def chat(self, messages: Sequence[Sequence[Message]], **options: Any) -> list[Output]: ...
    def chat(
        self, messages: Any, *, n: int = 1, template_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        """Answer a conversation, or each of a list of them, by the model's chat template.

        If the last message is the assistant's, the answer continues it.

        Args:
            messages: ``[{"role": "user", "content": "Hello"}]``, or a list of such lists.
            n: samples of each, as in :meth:`generate`.
            template_kwargs: for the template: ``{"tools": [...]}``, ``{"enable_thinking": False}``, ... Tools that the
                template ignores are refused; other unknown names have no effect.
            options: as in :meth:`generate`.

        Raises:
            ValueError: no tokenizer or template, messages of another shape or that the template refuses; and as for
                :meth:`generate`.
        """
        conversations, single = conversations_of(messages)
        ids = render_with(conversations, self.tokenizer, template_kwargs)
        return self.generate(ids[0] if single else ids, n=n, **options)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Piece]:
        """Generate for one prompt, yielding a piece per round."""
        pieces = Pieces(self.tokenizer)
        for run, emission in self.calls.follow(self.request(prompt, **options)):
            yield pieces.push(run, emission)

    def request(self, prompt: Prompt, **options: Unpack[Options]) -> Request:
        """A checked request; :attr:`defaults` fill in missing ``options``.

        Raises:
            ValueError: an option out of range.
            TypeError: an unknown option.
        """
        defaults = beside(self.defaults.sampling, options.get("constraint"))
        request = make_request(prompt, self.tokenizer, **{**defaults, **options})
        room = self.target.context_length - len(request.prompt)
        unasked = self.defaults.sampling.keys() - options.keys()
        if "max_new_tokens" not in options and 0 < room < request.max_new_tokens:
            request = replace(request, max_new_tokens=room)  # the default, not the user, exceeds the context
        if "min_tokens" in unasked:  # the model's own is limited to the request's maximum, as in generate
            check_whole("max_new_tokens", request.max_new_tokens)
            request = replace(request, min_tokens=min(request.min_tokens, request.max_new_tokens))
        return request

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.  Raises ``ValueError`` as :func:`foretoken.core.prompts.encode` does."""
        return encode(prompt, self.tokenizer)

    def memory(self) -> dict[str, int]:
        """Memory of the target in bytes: ``kv_bytes`` (keys and values of running sequences), ``kv_peak_bytes`` (their
        peak), ``kv_bytes_per_token``, ``prefix_bytes`` (the prefix cache) and ``weight_bytes`` (packed copies
        included). The first three are 0 for models with recurrent layers, which do not count keys and values."""
        target = self.target
        return {
            "kv_bytes": target.kv_bytes,
            "kv_peak_bytes": target.kv_peak_bytes,
            "kv_bytes_per_token": target.kv_bytes_per_token,
            "prefix_bytes": self.engine.requests.prefix_cache.prefixes.nbytes,
            "weight_bytes": target.weight_bytes + target.copied_bytes,
        }

    @property
    def exactness(self) -> str:
        """``"bitwise"``: drafts and batches never change an output; ``"rounding"``: near-ties may differ."""
        return self.target.exactness

    def describe(self) -> dict[str, Any]:
        """Description of the running target: ``{"forward", "weights", "exactness", "exactness_why", "threads",
        "refused", "graphs_off"}``. ``refused`` lists ``{"path", "why", "costs"}`` of every faster path that was tried
        and not taken. ``graphs_off`` is the reason why no CUDA graphs run (empty if they do). ``"drafts"`` lists
        ``{"drafter", "weights", "vocabulary"}`` of the drafter, or of each in a group."""
        return {**self.target.describe(), "drafts": described(self.drafter)}

    def _run(self, requests: Sequence[Request]) -> list[Output]:
        return outputs_of(self.calls.end(requests), self.tokenizer)

    @property
    def plain(self) -> Llm:
        """The same target without speculation (shares the model, not the requests)."""
        llm = Llm(self.target, None, None, None, self.tokenizer)
        llm.defaults = self.defaults
        return llm


@explains_full_memory
def load(
    target: Any = BUILTIN,
    drafter: Part | Sequence[Part] | None = "auto",
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
    prefix_cache: bool = True,
    known: bool = False,
    tensor_parallel: int = 1,
    generation_config: str | None = "auto",
    backend: str = "auto",
) -> Llm:
    """Load a target with its drafter, verifier and controller.

    Args:
        target: ``"builtin"``, ``"builtin:early_exit"`` (trained for early exits), ``"builtin:hybrid"`` (with recurrent
            layers and an MTP head), a name such as ``"smollm2"`` (``foretoken models`` lists and fetches them), the
            path of a model, a low-rank update or a GGUF file, a hub id, a ``PreTrainedModel`` (also offloaded by
            accelerate, compiled or in a ``DataParallel``; it is put into eval mode and stays so) or a
            :class:`LanguageModel`.
        drafter: a spec string (``"ngram,n=3,k=8"``, ``"model:./draft,k=5"``), a drafter, a draft model (a
            ``PreTrainedModel``, the target's own too, or a :class:`LanguageModel`), a list of them (an ensemble),
            ``None`` for plain decoding, or ``"auto"``.
        verifier: a name, a verifier, or ``"auto"`` for the best lossless rule.
        controller: a spec string, a controller, or ``"auto"``.
        tokenizer: a Transformers tokenizer; by default the one in the target's folder.
        dtype: ``float32``, ``float64``, ``bfloat16``, ``float16``; by default that of the checkpoint or model.
        device: device of the models: ``cpu``, ``cuda``, ``cuda:1``, ``mps``, or ``"auto"`` for the first available of
            cuda, mps and cpu. By default the cpu, or the device of a passed model; draft models use the target's
            device.
        allow_lossy: permit verifiers that change the target's distribution.
        exact: ``"distribution"`` or ``"bitwise"`` (sums do not depend on how many tokens are scored together: a
            bfloat16 target then gives the same tokens with and without speculation; slower. With our own kernels,
            ``docs/packing.md``, most models do so by default).
        profile: a JSON file with ``drafter``, ``verifier`` and ``controller`` specs for arguments left at ``"auto"``,
            and with the costs that ``foretoken tune`` measured.
        inflate: for benchmarks, enlarge the target to this size (``"300m"``, ``"1b"``, ``"3b"``, ``"7b"``, or a number
            of parameters) with unchanged outputs.
        pack: whether linear layers may be packed, in place, if this machine multiplies them faster so (measured once
            per machine, see ``docs/packing.md``). By default only those of models loaded here; ``True``: also those of
            a passed model (``llm.target.unpack()`` reverts it); ``False``: none.
        quantize: ``"int8"`` or ``"int4"`` (``"int8-a8"``, ``"int4-a8"``: with activations of 8 bits): quantise the
            weights of a loaded target, on the CPU. A quantised target has its own distribution, which speculation
            keeps.
        graphs: run the target and its draft model as CUDA graphs (:mod:`foretoken.models.forward.graphed`): ``"auto"``
            if they are on a CUDA device and a check at load passes, ``True`` (an error if impossible), ``False``.
        prefix_cache: cache finished sequences (their keys and values, at most 64 MiB), so that the next turn of a
            conversation prefills only new tokens.
        known: draft what a grammar forces and what a caller predicts, with any drafter (``docs/methods/known.md``);
            servers do so.
        tensor_parallel: processes on this machine (CUDA: devices) that the target is split over
            (:mod:`foretoken.models.other.parallel`), for drafters that do not use its layers.
        generation_config: ``"auto"``: sampling options that a request leaves out are those of the model's
            ``generation_config.json`` or GGUF header, if any (``llm.defaults``); ``None``: greedy and without limits.
        backend: runtime of a GGUF file: ``"auto"`` (our own reader if it supports the file, else llama.cpp),
            ``"native"`` or ``"llama.cpp"``.

    Warns:
        ProfileWarning: the profile was measured with another target or on another machine.

    Raises:
        LoadError: a checkpoint is missing, damaged or pickled, or the device is full.
        ValueError: an unknown name, option or device, impossible graphs, a bad profile, or incompatible parts.
    """
    if generation_config not in ("auto", None):
        text = " ".join(repr(generation_config).split())[:60]
        raise ValueError(f"generation_config must be 'auto' or None, not {text}: requests take such options")
    check_flags(allow_lossy=allow_lossy, prefix_cache=prefix_cache, known=known)
    tuned = {} if profile is None else read_profile(profile, runs_code=not _is_auto(drafter))
    drafter = tuned.get("drafter", drafter) if _is_auto(drafter) else drafter
    verifier = tuned.get("verifier", verifier) if _is_auto(verifier) else verifier
    controller = tuned.get("controller", controller) if _is_auto(controller) else controller
    check_tokenizer(tokenizer)
    check_specs(allow_lossy=allow_lossy, drafter=drafter, verifier=verifier, controller=controller)
    defaults = GenerationDefaults() if generation_config is None else read_defaults(target)
    extra: dict[str, Any] = {"inflate": inflate, "pack": pack, "quantize": quantize, "tensor_parallel": tensor_parallel}
    model = load_model(target, dtype=dtype, device=device, exact=exact, backend=backend, **extra)
    with closed_on_error(model, target):
        if model is not target or graphs != "auto":  # a passed language model stays unchanged
            model = with_graphs(model, graphs)
        tokenizer = tokenizer if tokenizer is not None else load_tokenizer(target, backend)
        if model is not target:
            model.eos_token_ids |= frozenset(end for end in turn_ends(tokenizer) if end < model.vocab_size)
        spec = default_drafter(model, target) if _is_auto(drafter) else drafter
        beside = None if str(device) == "auto" else device  # the target's own device
        built = build_drafter(spec, model, target_source=target, tokenizer=tokenizer, device=beside, known=known)
        cache_bytes = 64 * 2**20 if prefix_cache else 0
        with blaming():
            llm = assemble(
                model, built, verifier, controller, tokenizer, allow_lossy=allow_lossy, prefix_bytes=cache_bytes
            )
            llm.defaults = defaults
            if profile is not None:
                _start_from(llm, tuned, profile)
            elif model is not target and isinstance(target, str | Path):
                _calibrate(llm)
    return llm


def _calibrate(llm: Llm) -> None:
    """Start a controller that weighs costs from measured ones; a passed model is not run unasked."""
    controller, drafter, costs = llm.engine.controller, llm.drafter, None
    if drafter is not None and controller is not None and controller.weighs_costs:
        with suppress(ValueError), blaming():  # requests report the error; costs are then learned from rounds
            costs = calibrated(llm.target, drafter)
        if costs is not None:
            controller.start_from(costs)


def _start_from(llm: Llm, tuned: Mapping[str, Any], profile: str | Path) -> None:
    controller = llm.engine.controller
    costs = costs_for(tuned, llm.target, profile, controller is not None and controller.uses_costs)
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
    prefix_bytes: int = 0,
) -> Llm:
    """An :class:`Llm` from loaded models; verifier and controller may still be specs."""
    chosen_verifier = (
        None if verifier == "auto" else make("verifier", verifier) if isinstance(verifier, str) else verifier
    )
    chosen_controller = build_controller(controller) if isinstance(controller, str) else controller
    return Llm(
        target,
        drafter,
        chosen_verifier,
        chosen_controller if drafter is not None else None,
        tokenizer,
        allow_lossy=allow_lossy,
        prefix_bytes=prefix_bytes,
    )
