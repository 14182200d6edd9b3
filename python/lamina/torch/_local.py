# SPDX-License-Identifier: MIT
import contextlib
import copy
import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Optional, TYPE_CHECKING, Union

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

import lamina
from lamina.torch import _report, _step
from lamina.torch._checkpoint import checksum_of, is_count, is_flat, require, require_unmixed, warn_of_saver
from lamina.torch._local_cpu import CpuExchange
from lamina.torch._local_device import DeviceExchange, Later, Status
from lamina.torch._options import Backend, Payload, given_options, warn_of_large_layers
from lamina.torch._report import StepReport, Totals
from lamina.torch._own import OwnParameters
from lamina.torch._sharded import local_of
from lamina.torch._state import _difference, _one_of

if TYPE_CHECKING:
    from typing_extensions import Unpack
    from lamina.torch._options import Choice

FORMAT = 6  # of what state_dict() has under 'local_updates'
_LONGEST_DELAY = 64
Exchange = Union[CpuExchange, DeviceExchange]  #: what makes the numbers: bitwise identical on both


class LocalUpdates(torch.optim.Optimizer, Joinable):  # type: ignore[misc, unused-ignore]
    """Local updates around any optimizer: each rank steps on its own parameters at once, and what its optimizer did that the
    others have not seen, its local delta, is sent in fragments, those of the largest score first. Wraps the
    optimizer as PostLocalSGDOptimizer does, for a module without DDP:

        optimizer = lamina.torch.LocalUpdates(torch.optim.AdamW(model.parameters()), send_budget=0.04, fragment_elements=4096)
        loss.backward(); optimizer.step(); optimizer.zero_grad()

    `step()` is the optimizer's step and `exchange()`, in which all ranks take part: each calls it as often as the others. Schedulers
    of the learning rate take either optimizer. What the parameters of all ranks have in common, the shared parameters, is what to
    evaluate, by evaluation_parameters(), and to keep, by shared_state_dict().
    """

    _step_supports_amp_scaling = True  # so that a GradScaler never leaves out a step() in silence: it is told in step()

    def __init__(self, optimizer: torch.optim.Optimizer, *, process_group: Optional[dist.ProcessGroup] = None, delay: int = 0,
                 outer_rate: float = 1.0, outer_momentum: float = 0.0, payload: Optional[Payload] = None,
                 error_feedback: Optional[bool] = None, by_score: bool = True,
                 backend: Backend = "auto", log_every: int = 0, **options: "Unpack[Choice]") -> None:
        """On all ranks at a time, which begin with the parameters of rank 0, and compare what they are told.

        optimizer: any, whose parameters are float32 or bfloat16, DTensors among them, and on one device. Of bfloat16 it
            keeps float32 masters. Its state never leaves the rank.
        delay: steps between sending and applying, in [0, 64]. What is sent goes to its owners and back during the computation, half of
            the steps each way: with 1 the way there is waited for, from 2 on nothing is. The representative values are averaged in the step
            itself, whatever the delay.
        outer_rate, outer_momentum: of the outer optimizer; the default averages. In the study of docs/results/learning.md, with four workers and AdamW,
            0.7 and 0.6 were better than 0.7 and 0.9, and not significantly different from averaging. With SGD with momentum 1 and 0.75, at a quarter of
            the learning rate, were better than averaging; on the toy of docs/pytorch/local-updates.md they were worse.
        payload: as_is, float16, bfloat16, int8, int4 or ternary, on both ways; None: ternary, a bit or two an element, if the optimizer
            normalises its steps, as Adam, Muon and Lion do, otherwise as_is. Each rank owns shards, adds up what the others send
            of them, in the order of the ranks, and replies to all. What rounding takes away of what is sent stays in the local delta, and of
            a reply with its owner.
        error_feedback: what a message leaves out waits outside of the local delta, in memory of its own, and joins the next of its
            fragment, so that the rank computes with what all share. None: with ternary.
        by_score: whether fragments are selected by their value times the steps since they were last sent, or by the value.
        backend: "cpu": lamina's C++; "torch": torch's operators, on any device; "auto": "cpu" where the parameters are on the CPU. With
            "torch" no exchange makes the host wait for the device: parameters that are not finite, sums that are not, and ranks that
            have parted are reported by the next exchange, and nothing is averaged meanwhile. It moves the parameters into one tensor,
            sends payloads of one size in all steps, and refuses at_least_every, warm_up_steps and search_every.
        log_every: steps between lines of rank 0, to stderr unless the logger lamina.torch is set up for INFO; 0: none.
        options: the fields of lamina.Options but for momentum. value: mean_abs, root_mean_square or l2_norm.

        TypeError for what is no optimizer, or one that sends parameters itself or has train() and eval(), and, naming the parameter, for
        one that is of another type, on another device, sparse, has gaps, or shares memory with another; ValueError, naming the option, for one
        outside its range; RuntimeError without a process group, or naming what two ranks differ in. A rank that raises any but the last
        by itself leaves the others waiting until it ends.
        """
        Joinable.__init__(self)
        _require_wrappable(optimizer)
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("LocalUpdates: the process group is not initialised; call torch.distributed.init_process_group before")
        if not isinstance(delay, int) or not 0 <= delay <= _LONGEST_DELAY:
            raise ValueError(f"delay must be a whole number in [0, {_LONGEST_DELAY}], got {delay!r}")
        if log_every < 0:
            raise ValueError(f"log_every must not be negative, got {log_every}")
        self.optimizer = optimizer
        torch.optim.Optimizer.__setstate__(self, {})  # what an optimizer has for its hooks
        self.options = given_options("LocalUpdates", options)
        if self.options.momentum != 0:
            raise ValueError("momentum: a local delta has none, the optimizer may")
        self.process_group = process_group
        self.world_size, self.rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        self.delay, self.log_every = delay, log_every
        self._outer_options: Dict[str, Any] = {"rate": float(outer_rate), "momentum": float(outer_momentum)}
        self._payload: Payload = payload if payload is not None else "ternary" if _normalises(optimizer) else "as_is"
        self._error_feedback = self._payload == "ternary" if error_feedback is None else bool(error_feedback)
        self._by_score = bool(by_score)
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.names = [f"group {g}, parameter {p}" for g, group in enumerate(optimizer.param_groups)
                      for p in range(len(group["params"]))]
        self._own = OwnParameters(self.names, self._parameters, process_group, _one_of("backend", backend, ("auto", "cpu", "torch")))
        self.shapes = self._own.shapes
        self._layout = lamina.Layout(dict(zip(self.names, self.shapes)))
        told: Any = {"by_score": self._by_score, "payload": self._payload, "error_feedback": self._error_feedback, "outer": self._outer_options,
                     "delay": delay, "group": process_group}
        self.backend: Exchange = (CpuExchange(self._layout, self.options, **told) if self._own.uses_cpu
                                  else DeviceExchange(self._layout, self.options, device=self._own.device, **told))
        self._found: Optional[Later] = None  # by the last exchange on a device
        self._fragments = self.backend.fragments
        self._sizes = self._fragments.sizes
        self.totals = Totals()
        self._last: Optional[StepReport] = None  # once it was asked for
        self._evaluates = False
        self._equal_steps = 0  # one after the other, in which all ranks had the same local deltas
        self._agree_on_the_run()
        with torch.no_grad():
            self.backend.begin(self.names, self._own)
        if self.rank == 0:
            warn_of_large_layers(self.names, self.shapes, self.options)

    @contextlib.contextmanager
    def _taken(self, what: str) -> Iterator[None]:
        """Around whatever reads or writes the rank's own parameters."""
        count = sum(len(group["params"]) for group in self.param_groups)
        if count != len(self._parameters):
            raise RuntimeError(f"{what}: the optimizer has {count} parameters, and had {len(self._parameters)} when it was wrapped; wrap it "
                               "after add_param_group")
        with torch.no_grad():
            self._own.take(what)
            try:
                yield
            finally:
                self._own.give()

    def _require_own_parameters(self, what: str) -> None:
        if self._evaluates:
            raise RuntimeError(f"{what}: the parameters are those of evaluation_parameters(); leave it first")

    def _told(self) -> Dict[str, Any]:
        return {"names": self.names, "shapes": self.shapes,
                **{f"the stride of {name}": strides for name, strides in zip(self.names, self._own.strides)}, "types": self._own.types,
                "delay": self.delay, "payload": self._payload, "error_feedback": self._error_feedback, "by_score": self._by_score,
                "backend": "cpu" if self._own.uses_cpu else "torch", **dataclasses.asdict(self.options),
                **{f"outer_{name}": value for name, value in self._outer_options.items()}}

    def _agree_on_the_run(self) -> None:
        told: List[Dict[str, Any]] = [{}] * self.world_size
        dist.all_gather_object(told, self._told(), group=self.process_group)
        for rank, theirs in enumerate(told):
            for name, value in told[0].items():
                if theirs[name] != value:
                    raise RuntimeError(f"LocalUpdates: {_difference(name, value, theirs[name], rank)}")

    # --- a step ------------------------------------------------------------------------------------------------------------

    def step(self, closure: Optional[Callable[[], Any]] = None, *, grad_scaler: Any = None) -> Any:
        """The optimizer's step, and exchange(). No exchange in the step by which get_optimizer_state_dict creates an optimizer's state, known
        by having no state, no gradient and no learning rate.

        Args:
            closure: as of the optimizer.
            grad_scaler: none; a GradScaler would leave the step out on one rank only. Give `scaler.step` the optimizer that this wraps,
                and call exchange() after it.

        Returns:
            What the optimizer's step returns.

        Raises:
            RuntimeError: from a GradScaler, and within evaluation_parameters(), before the optimizer has done anything.
            ValueError, OverflowError: as exchange().
        """
        if grad_scaler is not None or getattr(self, "found_inf", None) is not None:
            raise RuntimeError("LocalUpdates: a scaler leaves out steps, and all ranks must exchange in each; call "
                               "scaler.step(local.optimizer), and then local.exchange()")
        self._require_own_parameters("step")
        creates_state = not self.optimizer.state and all(
            float(group.get("lr", 1)) == 0 for group in self.param_groups) and not any(
                parameter.grad is not None and local_of(parameter.grad).any() for parameter in self._parameters)
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        if not creates_state:
            self.exchange()
        return loss

    def zero_grad(self, *arguments: Any, **named: Any) -> None:
        self.optimizer.zero_grad(*arguments, **named)

    def join_hook(self, **_: Any) -> JoinHook:
        """For torch.distributed.algorithms.Join: a rank without batches goes on exchanging while others train, as if its optimizer had left
        out its steps."""
        return _Exchanging(self)

    @property
    def join_device(self) -> torch.device:
        return self._own.device

    @property
    def join_process_group(self) -> Any:
        return self.process_group if self.process_group is not None else dist.group.WORLD

    def exchange(self) -> None:
        """What follows each step of the optimizer: fragments of the local deltas are brought together. All ranks call it as often, also one
        whose optimizer has left out its step.

        Parameters that are NaN or infinite on any rank raise on all, ValueError there and RuntimeError on the others, before anything
        was sent: shared parameters and local deltas are as they were, and once the rank's parameters are mended training goes on. If a
        collective fails, what was under way is in the local delta again, and state_dict() still works. Ranks of which one alone has failed
        raise RuntimeError in the next exchange, or, if others wait for its answer, after the process group's timeout. OverflowError, on
        all ranks, for a sum of local deltas that is not finite. RuntimeError, naming the parameter, if one has another shape or order in
        memory than when its optimizer was wrapped, and, on all ranks, if another calls finish() or evaluation_parameters() meanwhile.
        """
        Join.notify_join_context(self)
        self._exchange()

    def _exchange(self) -> None:
        self._require_own_parameters("exchange")
        with self._taken("exchange"):
            self._raise_what_was_found()
            with self._or_abandoned():
                found = self.backend.exchange(lambda: _step.past_of(self, self._alike("exchange")))
                if isinstance(found, Status):
                    self._require_one_past(found)
            if isinstance(found, Status):
                self._look_at(found)
            else:
                self._found = found
        self._last = None
        self.totals = dataclasses.replace(self.totals, steps=self.totals.steps + 1, sent_bytes=self.totals.sent_bytes + self.backend.sent_bytes,
                                          dense_bytes=self.totals.dense_bytes + self._own.dense_bytes)
        if self.rank == 0 and self.log_every and self.backend.step % self.log_every == 0:  # else the host need not wait for `last`
            report = self.last
            assert report is not None
            _report.log(report, self.log_every, self.rank)

    def _raise_what_was_found(self) -> None:
        """By the last exchange on a device. It is the same on all ranks, which all raise here."""
        if self._found is not None:
            status, self._found = self._found.status(), None
            self._require_one_past(status)
            self._look_at(status)

    def _require_one_past(self, status: Status) -> None:
        if not status.is_one:
            raise RuntimeError(_step.parted(self, self._alike("exchange")))

    def _look_at(self, status: Status) -> None:
        if not status.is_finite:
            raise self._not_finite()
        if status.overflowed:
            raise OverflowError(f"LocalUpdates: the sum of what was sent up to step {self.backend.step} is not finite; it is in the local "
                                "deltas again")
        self._count_equal_deltas(status.has_deltas and status.has_equal_deltas)

    @property
    def last(self) -> Optional[StepReport]:
        """The last exchange. On a device it waits for it."""
        if self._last is None and (sent := self.backend.last_sent) is not None:
            step, fragments, elements, threshold = sent
            self._last = StepReport(step, False, threshold, len(self._sizes), fragments, self._fragments.elements, elements,
                                    self._own.dense_bytes, self.backend.sent_bytes, 0, {})
        return self._last

    @property
    def last_choice(self) -> int:
        return self.backend.last_choice

    def finish(self) -> None:
        """Ends training, or a phase of it, on all ranks together. Applies the updates that are under way, then averages all local
        deltas with one all-reduce of the model, as DDP makes one a step, which the totals count. Afterwards every rank has the shared
        parameters, and they hold all that any rank has done. The average goes past the outer optimizer. Training may go on.

        Raises:
            ValueError, RuntimeError: as exchange(), for parameters that are not finite; the updates are applied, and no more.
        """
        self._require_own_parameters("finish")
        self._raise_what_was_found()
        with self._taken("finish"), self._or_abandoned():
            self._meet("finish")
            self.backend.finish()
            self.backend.set_all(self._average())
        self.totals = dataclasses.replace(self.totals, sent_bytes=self.totals.sent_bytes + 4 * self._fragments.elements)

    def _average(self) -> List[torch.Tensor]:
        average = self.backend.average()
        if average is None:
            raise self._not_finite()
        return average

    @contextlib.contextmanager
    def _or_abandoned(self) -> Iterator[None]:
        """If what is within fails, all that was under way is in the local delta again."""
        try:
            yield
        except BaseException:
            self.backend.abandon()
            raise

    def _meet(self, call: str) -> None:
        """The first all-reduce of a call, of one size whatever the call is, so that ranks that make different ones raise instead of
        summing what does not fit."""
        alike = self._alike(call)
        _step.require_one_past(self, self.backend.meet(_step.past_of(self, alike)), alike)

    def _alike(self, call: str) -> Dict[str, Any]:
        """By which ranks notice that they make different calls, or that what one of them abandoned was applied on another."""
        return {"the call": call, "step": self.backend.step, "the last step applied": self.backend.applied,
                "what is under way": [going.step for going in self.backend.under_way]}

    def _count_equal_deltas(self, are_equal: bool) -> None:
        """Warns once the local deltas of all ranks were bitwise equal in two steps, one after the other, which independent ranks never have."""
        self._equal_steps = self._equal_steps + 1 if are_equal and self.world_size > 1 else 0
        if self._equal_steps == 2 and self.rank == 0:
            _report.logger.warning(
                "LocalUpdates: the local deltas of all %d ranks are bitwise equal. Either the model is wrapped in "
                "DistributedDataParallel, as accelerate, Lightning and the Hugging Face Trainer do by themselves: then all gradients "
                "are sent, and not the %.2g %% that lamina reports. Train without it (docs/pytorch/local-updates.md). Or all ranks "
                "read the same data: give each its own, as by DistributedSampler", self.world_size, 100 * self.totals.ratio)

    def _not_finite(self) -> Exception:
        """What each rank raises once all know that a number is not finite."""
        own = next((name for name, y, x in zip(self.names, self._own.flat, self.backend.shared_layers()) if not torch.isfinite(x - y).all()),
                   None)
        self._own.are_lost = own is not None
        which: List[Optional[str]] = [None] * self.world_size
        dist.all_gather_object(which, own, group=self.process_group)
        if own is not None:
            return ValueError(f"LocalUpdates: {own} is not finite")
        for rank, each in enumerate(which):
            if each is not None:
                return RuntimeError(f"LocalUpdates: the parameters of rank {rank} are not finite; nothing was averaged")
        return OverflowError("LocalUpdates: the sum of all local deltas is not finite")

    # --- what all share ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluation_parameters(self, module: Optional[torch.nn.Module] = None, *, average: bool = False) -> Iterator[None]:
        """Within it the parameters are the shared ones, bitwise identical on all ranks, and after it this rank's own again. Takes a copy of
        the parameters. step(), exchange(), finish(), state_dict() and load_state_dict() raise within.

        Args:
            module: whose floating-point buffers, such as those of batch normalisation, are the mean over the ranks meanwhile. All ranks
                then enter together.
            average: whether the local deltas are averaged in, so that the parameters are what finish() would leave; at its cost, and on
                all ranks together. Training is not changed.

        Raises:
            ValueError, RuntimeError: with average, as finish().
        """
        if self._evaluates:
            raise RuntimeError("evaluation_parameters: it was entered already")
        buffers = [] if module is None else [each for each in module.buffers() if each.is_floating_point()]
        with self._taken("evaluation_parameters"):
            if buffers or average:
                self._meet("evaluation_parameters")
            local, shared = self.backend.tensors()
            shared = self._average() if average else shared
            means = self._mean_buffers(buffers)
        tensors = local + [each.detach() for each in buffers]
        own = [each.clone() for each in tensors]
        self._evaluates = True
        try:
            self._set(tensors, shared + means)
            yield
        finally:
            self._set(tensors, own)
            self._evaluates = False

    def _set(self, tensors: List[torch.Tensor], to: List[torch.Tensor]) -> None:
        with torch.no_grad():
            for each, other in zip(tensors, to):
                each.copy_(other)
            self._own.give()

    def shared_state_dict(self, module: torch.nn.Module, *, average: bool = False) -> Dict[str, Any]:
        """The model to keep: copies of what module.state_dict() gives within evaluation_parameters(module). Whereas module.state_dict()
        itself, called there, refers to the module's tensors, which are this rank's own again afterwards.

        Args:
            module: whose parameters the optimizer has. All ranks call this together.
            average: as of evaluation_parameters().

        Returns:
            The same on all ranks, but for buffers of integers. Raises as evaluation_parameters().
        """
        with self.evaluation_parameters(module, average=average):
            return copy.deepcopy(module.state_dict())

    def _mean_buffers(self, buffers: List[torch.Tensor]) -> List[torch.Tensor]:
        if not buffers:
            return []
        sums = torch.cat([each.detach().double().flatten() for each in buffers])
        dist.all_reduce(sums, group=self.process_group)
        sums /= self.world_size
        return [mean.view(each.shape).to(each.dtype)
                for mean, each in zip(torch.split(sums, [each.numel() for each in buffers]), buffers)]

    # --- as an optimizer ---------------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> Any:  # type: ignore[override, unused-ignore]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override, unused-ignore]
        return self.optimizer.state

    @property
    def defaults(self) -> Any:  # type: ignore[override, unused-ignore]
        return self.optimizer.defaults

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """RuntimeError: the parameters that ranks share are those the optimizer had."""
        raise RuntimeError("add_param_group: LocalUpdates is of the parameters that the optimizer had when it was wrapped")

    def __repr__(self) -> str:
        return f"LocalUpdates({self.optimizer!r})"

    def __getstate__(self) -> Dict[str, Any]:
        raise TypeError("LocalUpdates cannot be pickled or copied; save its state_dict()")

    # --- checkpoints -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> Dict[str, Any]:
        """The optimizer's, and under 'local_updates' all else that a later step of this rank depends on, its own parameters included.
        Each rank saves its own, between steps. Waits for what is under way.

        Returns:
            Tensors of their own, but for those of the wrapped optimizer. A warning tells of a framework that asks for it and keeps one
            rank's for all; per_rank() is for those.

        Raises:
            RuntimeError: within evaluation_parameters(), as exchange() for parameters that were laid out anew, and if what is under way
                fails: it is in the local delta again then, and the next state_dict() works.
        """
        self._require_own_parameters("state_dict")
        for hook in getattr(self, "_optimizer_state_dict_pre_hooks", {}).values():
            hook(self)
        with self._taken("state_dict"):
            pass
        if self.world_size > 1:
            warn_of_saver("LocalUpdates")
        with torch.no_grad(), self._or_abandoned():
            self.backend.settle()
        own = {"format": FORMAT, "lamina": lamina.__version__, "told": self._told(), "world_size": self.world_size, "rank": self.rank,
               "totals": dataclasses.asdict(self.totals), **self.backend.save()}
        state = {**self.optimizer.state_dict(), "local_updates": own}
        own["checksum"] = checksum_of(self.rank, state)
        for hook in getattr(self, "_optimizer_state_dict_post_hooks", {}).values():
            changed = hook(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Goes on where this rank was saved, bit for bit. Gives the module's parameters this rank's own values: a module that is loaded
        from a file of all ranks is loaded before this.

        Args:
            state_dict: what this rank saved, or the result of merge_states().

        Raises:
            ValueError: naming what differs, and nothing changed, for the state of another optimizer, rank or number of ranks, for other
                options, and for one that is damaged.
            RuntimeError: as state_dict().
        """
        for hook in getattr(self, "_optimizer_load_state_dict_pre_hooks", {}).values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._load(state_dict)
        for hook in getattr(self, "_optimizer_load_state_dict_post_hooks", {}).values():
            hook(self)

    def _load(self, state_dict: Dict[str, Any]) -> None:
        self._require_own_parameters("load_state_dict")
        with self._taken("load_state_dict"):
            pass
        saved = state_dict.get("local_updates") if isinstance(state_dict, dict) else None
        if saved is None:
            raise ValueError("load_state_dict: there is no 'local_updates' in the state: it was saved by the wrapped optimizer, or by "
                             "get_optimizer_state_dict, which drops it; save lamina.torch.per_rank(...) of LocalUpdates")
        if not isinstance(saved, dict) or not isinstance(saved.get("told"), dict):
            raise ValueError("load_state_dict: what is under 'local_updates' was not saved by LocalUpdates")
        if saved.get("format") != FORMAT:
            raise ValueError(f"load_state_dict: the format is {saved.get('format')}, this version reads {FORMAT}")
        told = self._told()
        theirs = {"backend": "cpu", **saved["told"], **{name: saved.get(name) for name in ("world_size", "rank")}}
        if theirs["world_size"] != self.world_size:
            raise ValueError(f"load_state_dict: world_size is {self.world_size} here and {theirs['world_size']} in the saved state; give "
                             "all saved states to lamina.torch.merge_states")
        for name, own in (("rank", self.rank), *told.items()):
            if theirs.get(name) != own and (name, theirs.get(name)) != ("rank", None):
                raise ValueError(f"load_state_dict: {_difference(name, own, theirs.get(name), None)}")
        try:
            for name in ("state", "param_groups"):
                require(name in state_dict, f"'{name}' of the optimizer is missing")
            for name in ("totals", "checksum"):
                require(name in saved, f"'{name}' is missing")
            totals = saved["totals"]
            require(isinstance(totals, dict) and totals.keys() == dataclasses.asdict(self.totals).keys()
                    and all(is_count(value) for value in totals.values()), f"'totals' is {totals!r}")
            if theirs["rank"] is None and all(is_flat(saved.get(name), torch.float32) for name in ("momentum", "rounding")):
                saved = {**saved, **{name: self.backend.own_slices(saved[name]) for name in ("momentum", "rounding")}}
            self.backend.check(saved)
        except ValueError as error:
            raise ValueError(f"load_state_dict: {error}") from error
        require_unmixed("load_state_dict", saved, state_dict)
        self.optimizer.load_state_dict({name: value for name, value in state_dict.items() if name != "local_updates"})
        self.totals, self._last, self._found = Totals(**totals), None, None
        self.backend.load(saved)
        self._own.give()


# By a word in a class's name, or in that of one that it is derived from: the size of their steps does not depend on the size of gradients.
_NORMALISING = ("Adam", "Adagrad", "Adadelta", "Adafactor", "Adan", "Lion", "Muon", "Lamb", "LAMB", "RMSprop", "Rprop", "SOAP", "Shampoo",
                "Sophia", "SignSGD")


def _normalises(optimizer: torch.optim.Optimizer) -> bool:
    return any(word in kind.__name__ for kind in type(optimizer).__mro__ for word in _NORMALISING)


def _require_wrappable(optimizer: Any) -> None:
    kinds, name = {kind.__name__ for kind in type(optimizer).__mro__}, type(optimizer).__name__
    if isinstance(optimizer, LocalUpdates) or not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"LocalUpdates wraps a torch.optim.Optimizer, got {name}")
    if kinds & {"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"}:
        raise TypeError(f"LocalUpdates: {name} sends parameters to the other ranks itself, so that no rank has a local delta of its own; "
                        "give LocalUpdates the optimizer that it wraps")
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise TypeError(f"LocalUpdates: {name} has train() and eval(), with other parameters in each, and the ranks share those of "
                        "train() only; take an optimizer without the two")


class _Exchanging(JoinHook):  # type: ignore[misc, unused-ignore]
    def __init__(self, local: LocalUpdates) -> None:
        self._local = local

    def main_hook(self) -> None:
        self._local._exchange()
