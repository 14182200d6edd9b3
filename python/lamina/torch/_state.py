# SPDX-License-Identifier: MIT
import dataclasses
import itertools
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Sequence, TYPE_CHECKING, Union, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lamina
from lamina.torch import _overlapped, _report, _step
from lamina.torch._checkpoint import checksum_of, require_unmixed, warn_of_saver
from lamina.torch._cpu import CpuBackend
from lamina.torch._cuda import CudaBackend
from lamina.torch._device import TorchBackend
from lamina.torch._foreach import is_gapless
from lamina.torch._options import HookBackend, NonFinite, Wire, uses_cpu, warn_of_large_layers
from lamina.torch._report import StepReport, Totals, logger

if TYPE_CHECKING:  # torch.distributed does not tell type checkers that it has it
    from torch._C._distributed_c10d import GradBucket as GradBucket
else:
    from torch.distributed import GradBucket as GradBucket

FORMAT = 2  # of state_dict()

_FSDP_REFUSED = ("this takes a model that DistributedDataParallel replicates, and its parameters are sharded by FSDP. Between the replicas of "
                 "one that fully_shard has sharded, take lamina.torch.replicate")


def _one_of(what: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}, got {value!r}")
    return value


class LayerDropping:
    """The state of the hook on one rank: residual, options, what happened. One for each DDP object."""

    def __init__(self, options: Optional[lamina.Options] = None, *, process_group: Optional[dist.ProcessGroup] = None,
                 scaler: Any = None, nonfinite: NonFinite = "propagate", wire: Wire = "float32", backend: HookBackend = "auto",
                 overlap: bool = False, max_norm: Optional[float] = None, log_every: int = 0) -> None:
        """
        options: how layers are chosen.
        process_group: whose ranks average; DDP's if None.
        scaler: the GradScaler that scales the loss, so that a change of its scale does not change what waits.
        nonfinite: what becomes of a batch of which any rank's gradient holds NaN or infinity. "propagate": NaN in all
            gradients on all ranks, as DDP alone, so that GradScaler backs off alike; "skip": zeros; in both no residual changes.
            "leave_out": those elements are left out and counted.
        wire: how kept elements travel: "float32", or "bfloat16" for half the bytes; also as torch's dtypes. What a rank's own rounding takes away
            stays in its residual; what the process group rounds when it adds is lost.
        backend: "cpu", "torch" (any device), "cuda" (the kernels of lamina._cuda, where that was built; not with overlap, nor with another
            value than "mean_abs"), or "auto": the first of "cuda", "cpu" and "torch" that can be.
        overlap: whether the fragments of a step are selected at the end of the step before, so that each bucket's all-reduce is
            overlapped with backward. Of a batch that is skipped, what the finite gradients have added stays in the residuals.
            Learns somewhat more slowly (docs/pytorch/hook.md), sends everything in its
            first step, and needs every parameter to be used in every step.
        max_norm: a gradient of a rank whose norm is larger is scaled down to it before it is added to the residual. Clipping after
            backward() would take from what the residual delivers, which no rank keeps any more. Not with overlap, which adds the
            first buckets before the norm is known, nor with "leave_out".
        log_every: steps between lines of rank 0, to stderr unless the logger lamina.torch is set up for INFO; 0: none.
        """
        self.options = options if options is not None else lamina.Options()
        self.nonfinite = _one_of("nonfinite", nonfinite, ("propagate", "skip", "leave_out"))
        self.wire = _one_of("wire", str(wire).replace("torch.", ""), ("float32", "bfloat16"))
        self._backend_name = _one_of("backend", backend, ("auto", "cpu", "torch", "cuda"))
        if log_every < 0:
            raise ValueError(f"log_every must not be negative, got {log_every}")
        if scaler is not None and nonfinite != "propagate":
            raise ValueError(f"with a scaler nonfinite must be 'propagate', got {nonfinite!r}: the scaler looks for infinity itself")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be greater than 0, got {max_norm}")
        if max_norm is not None and (overlap or nonfinite == "leave_out"):
            raise ValueError(f"max_norm needs the norm of the whole gradient, which {'overlap=True' if overlap else 'leave_out'} does not have")
        if backend == "cuda":
            lamina.require_cuda("backend 'cuda'")
            if not self._fits_cuda(overlap):
                raise ValueError("backend 'cuda' measures by mean_abs and has no overlap; take 'torch', got " +
                                 ("overlap=True" if overlap else f"value={self.options.value!r}"))
        self.max_norm = None if max_norm is None else float(max_norm)
        self.process_group = self._given_group = process_group
        self.overlap = bool(overlap)
        self.log_every = log_every
        self.last: Optional[StepReport] = None
        self.totals = Totals()
        self.last_choice = 0
        self.plan: Optional[List[int]] = None  # with overlap: what the next step sends; None: everything
        self.passes = 0  # synchronised backward passes of this object, skipped ones too
        self.cut_elements = 0
        self._scaler = scaler
        self._had: List[str] = []  # what an unpickled state had and cannot bring: a scaler, a process group
        self._buckets: List[_step.Bucket] = []
        self._overlapped: Optional[_overlapped.OverlappedStep] = None  # between the first bucket and the last
        self._left: List[Any] = []  # allreduces of a step that was given up
        self._sent: List[int] = []
        self._all_reduce: Optional[Callable[[torch.Tensor], Any]] = None  # of the caller of reduce()
        self._is_bound = False
        self._pending: Optional[Dict[str, Any]] = None  # an unpickled state's memory, until bind()

    # --- binding -----------------------------------------------------------------------------------------------------------

    def bind(self, module: torch.nn.Module, *, scaler: Any = None,
             process_group: Optional[dist.ProcessGroup] = None) -> "LayerDropping":
        """Takes the model: DDP, or what DDP will wrap. Once, and on all ranks at a time: they compare what they are told.
        `scaler` and `process_group` are for a state that was unpickled, which has neither.

        TypeError for FSDP, for gradients that are complex, float64, sparse, or on several devices, and for a wire that the process
        group does not add; ValueError for a model without gradients, or one that was changed after DDP(...); RuntimeError for a
        second time, without a process group, without what an unpickled state had, or naming what two ranks differ in.
        """
        if self._is_bound:
            raise RuntimeError("bind: this state has a model already; one state for one DDP object")
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("bind: the process group is not initialised; call torch.distributed.init_process_group before")
        for name, value in (("scaler", scaler), ("process_group", process_group)):
            if value is None and name in self._had:
                raise RuntimeError(f"bind: the pickled state had a {name}, which cannot be pickled; give it again: "
                                   f"bind(module, {name}=...)")
        self._scaler = scaler if scaler is not None else self._scaler
        self.process_group = process_group if process_group is not None else self.process_group
        refuse_sharded(module)
        ignored = set(getattr(module, "parameters_to_ignore", ()))
        reduced = None
        if isinstance(module, DistributedDataParallel):
            reduced = cast(Any, module)._get_ddp_logging_data().get("num_parameter_tensors")  # by DDP, when it was made
            if self.process_group is None:
                self.process_group = module.process_group
            for option in ("find_unused_parameters", "static_graph"):
                if self.overlap and getattr(module, option):
                    raise ValueError(f"bind: overlap=True needs every parameter in every step, and DDP was made with {option}=True: "
                                     "it would throw away what was sent for an unused one")
            module = module.module
        elif self.overlap:
            raise TypeError("bind: overlap=True needs the DDP object itself, to know that every parameter is used in every step; "
                            f"got {type(module).__name__}")
        ignored |= set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        taken = [(name, parameter) for name, parameter in module.named_parameters() if name not in ignored]
        named = [(name, parameter) for name, parameter in taken if parameter.requires_grad]
        if not named:
            raise ValueError("bind: the model has no parameter that requires a gradient")
        if reduced is not None and reduced != len(named):
            raise ValueError(f"bind: {len(named)} parameters require a gradient, and {reduced} did when DDP(...) was called: "
                             "requires_grad was changed after it; make DDP after that")
        self._check_types(module, named)

        self._frozen = [(name, parameter) for name, parameter in taken if not parameter.requires_grad]
        self.names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._layer_of = {id(parameter): layer for layer, parameter in enumerate(self._parameters)}
        self.shapes = [list(parameter.shape) for parameter in self._parameters]
        self.strides = [list(parameter.stride() if is_gapless(parameter) else torch.empty(parameter.shape).stride())
                        for parameter in self._parameters]
        self.world_size = dist.get_world_size(self.process_group)
        self.rank = dist.get_rank(self.process_group)
        self._agree_with_others()

        device = self._parameters[0].device
        layout = lamina.Layout(dict(zip(self.names, self.shapes)))
        chosen = self._chosen_backend()
        if chosen != "torch" and device.type != chosen:
            raise TypeError(f"bind: backend '{chosen}' cannot read gradients on {device}; take 'torch' or 'auto'")
        if self.wire == "bfloat16":
            try:
                dist.all_reduce(torch.ones(1, dtype=torch.bfloat16, device=device), group=self.process_group)
            except RuntimeError as error:
                raise TypeError(f"bind: wire 'bfloat16' is not added by this process group of PyTorch {torch.__version__}: "
                                f"{error}") from error
        made: Callable[..., Union[CpuBackend, TorchBackend, CudaBackend]] = (
            CpuBackend if chosen == "cpu" else CudaBackend if chosen == "cuda" else TorchBackend)
        self.backend = made(layout, self.options, self.wire, device)
        self.layer_of_fragment = [layer for layer in range(len(layout)) for _ in range(*self.backend.fragments_of(layer))]
        self._is_bound = True
        if self._pending is not None:
            self.load_state_dict(self._pending)
            self._pending = None
        logger.info("%d layers in %d fragments, %d elements, rank %d of %d, %s", len(layout), len(self.backend.fragments),
                    layout.elements, self.rank, self.world_size, self.options)
        if self.rank == 0:
            warn_of_large_layers(self.names, self.shapes, self.options)
        return self

    def _fits_cuda(self, overlap: bool) -> bool:
        return not overlap and self.options.value == "mean_abs"

    def _chosen_backend(self) -> str:
        name, device = self._backend_name, self._parameters[0].device
        if name == "auto" and device.type == "cuda" and lamina.HAS_CUDA and self._fits_cuda(self.overlap):
            name = "cuda"
        return "cuda" if name == "cuda" else "cpu" if uses_cpu(name, device) else "torch"

    @staticmethod
    def _check_types(module: torch.nn.Module, named: Any) -> None:
        for prefix, each in module.named_modules():
            if getattr(each, "sparse", False) is True:
                raise TypeError(f"bind: '{prefix}.weight' has sparse gradients, which have no layer to send whole; use sparse=False")
        devices: Dict[torch.device, str] = {}
        for name, parameter in named:
            if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise TypeError(f"bind: '{name}' is of {parameter.dtype}; float32, float16 and bfloat16 can be sent")
            devices.setdefault(parameter.device, name)
        if len(devices) > 1:
            places = " and ".join(f"'{name}' on {device}" for device, name in devices.items())
            raise TypeError(f"bind: a model on one device is needed, there is {places}")

    def _agree_with_others(self) -> None:
        """Raises the same on all ranks if two differ in what would end in different collectives."""
        own = {"version": lamina.__version__, **dataclasses.asdict(self.options), "wire": self.wire, "nonfinite": self.nonfinite,
               "overlap": self.overlap, "max_norm": self.max_norm, "backend": self._chosen_backend(),
               "scaler": self._scaler is not None, "names": self.names, "shapes": self.shapes, "strides": self.strides,
               "dtypes": [str(parameter.dtype) for parameter in self._parameters]}
        theirs: List[Dict[str, Any]] = [{}] * self.world_size
        dist.all_gather_object(theirs, own, group=self.process_group)
        for field in own:
            for rank, each in enumerate(theirs):
                if each[field] != theirs[0][field]:
                    raise RuntimeError(f"bind: {_difference(field, theirs[0][field], each[field], rank)}")

    # --- the step ----------------------------------------------------------------------------------------------------------

    def take(self, bucket: GradBucket) -> "torch.futures.Future[torch.Tensor]":
        """What hook() does: keeps the bucket; the last one of a backward pass runs the step for all."""
        if not isinstance(bucket, GradBucket):
            raise TypeError("lamina.torch.hook needs DDP's reducer: set torch._dynamo.config.optimize_ddp to 'ddp_optimizer'")
        if not self._is_bound:
            raise RuntimeError("hook: the state has no model; call state.bind(ddp.module), or use lamina.torch.register")
        if bucket.index() == 0:
            self._buckets = []  # what an interrupted backward has left
            if self._overlapped is not None:
                self._give_up()
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise TypeError("hook: a bucket is sparse; sparse gradients have no layer to send whole")
        future: "torch.futures.Future[torch.Tensor]" = (
            torch.futures.Future() if buffer.device.type == "cpu" else torch.futures.Future(devices=[buffer.device]))
        self._buckets.append(_step.Bucket(buffer, [self._layer(each) for each in bucket.parameters()], bucket.gradients(), future))
        if self.overlap:
            self._start_allreduce(self._buckets[-1], bucket.index())
        if bucket.is_last():
            self._require_frozen()
            buckets, self._buckets = self._buckets, []
            if self._overlapped is not None:
                self._finish_overlapped(buckets)
            else:
                _step.run(self, buckets)
            for each in buckets:
                assert each.future is not None
                each.future.set_result(each.buffer)
        return future

    def reduce(self, gradients: Sequence[torch.Tensor], *, all_reduce: Optional[Callable[[torch.Tensor], Any]] = None,
               world_size: Optional[int] = None) -> StepReport:
        """One step without DDP: turns a gradient of each parameter that was bound, in place, into the mean of what was sent.

        Args:
            gradients: in the order of `names`, with the parameters' shapes and strides.
            all_reduce: sums a tensor, in place, over the ranks, and is done when it returns; the process group's if None. For torchft:
                `lambda each: manager.allreduce(each, reduce_op=ReduceOp.SUM).wait()`.
            world_size: the ranks whose sum that is, if they are others than those of the process group.

        Returns:
            What the step has sent; the same as `last`.

        Raises:
            ValueError: naming the parameter whose gradient is missing or lies in memory otherwise than it.
            RuntimeError: with overlap, which needs DDP, and if the ranks have parted.
        """
        self._require_bound("reduce")
        if self.overlap:
            raise RuntimeError("reduce: overlap=True needs DDP, whose buckets come one by one")
        for name, shape, strides, each in itertools.zip_longest(self.names, self.shapes, self.strides, gradients):
            if name is None or each is None or list(each.shape) != shape or each.numel() and list(each.stride()) != strides:
                raise ValueError(f"reduce: {len(gradients)} gradients for {len(self.names)} parameters" if name is None or each is None else
                                 f"reduce: '{name}' has shape {shape} and strides {strides}, its gradient {list(each.shape)} and "
                                 f"{list(each.stride())}")
        self._all_reduce, self.world_size = all_reduce, world_size if world_size is not None else self.world_size
        flat = [each.detach().as_strided((each.numel(),), (1,)) for each in gradients]
        with torch.no_grad():
            _step.run(self, [_step.Bucket(each, [layer], [each]) for layer, each in enumerate(flat)])
        assert self.last is not None
        return self.last

    def sum(self, tensor: torch.Tensor) -> None:
        """Over the ranks, in place."""
        if self._all_reduce is not None:
            self._all_reduce(tensor)
        else:
            dist.all_reduce(tensor, group=self.process_group)

    def _start_allreduce(self, bucket: _step.Bucket, bucket_index: int) -> None:
        try:
            if self._overlapped is None:
                if bucket_index != 0:
                    raise RuntimeError("hook: this backward pass was given up between two buckets, as by a state_dict() in the "
                                       "middle of it; call that between backward passes")
                self._overlapped = _overlapped.OverlappedStep(self, bucket.buffer.device)
            self._overlapped.add(bucket)
        except BaseException:
            self._give_up()
            raise

    def _finish_overlapped(self, buckets: List[_step.Bucket]) -> None:
        try:
            if self._overlapped is not None:
                self._overlapped.finish(buckets)
        except BaseException:
            self._give_up()
            raise
        self._overlapped = None

    def _give_up(self) -> None:
        """The step cannot be carried out; what its gradients had added stays in the residual."""
        step, self._overlapped = self._overlapped, None
        if step is not None:
            self._left = step.works  # nobody waits for them, since a rank may have died; their memory must stay
        self.backend.abandon()

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter's gradients go through this state."""
        return id(parameter) in self._layer_of

    def _layer(self, parameter: torch.Tensor) -> int:
        layer = self._layer_of.get(id(parameter))
        if layer is None:
            raise RuntimeError(f"hook: a parameter of shape {list(parameter.shape)} is in a bucket and was not in the model when "
                               "the state was bound; bind it to the module that DDP wraps")
        return layer

    def _require_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(f"hook: '{name}' requires a gradient, and did not when the state was bound: DDP does not average its "
                                   "gradient, and the replicas would part. Make DDP again, register, and give the new state "
                                   "load_state_dict(old.state_dict()), which goes by names")

    def loss_scale(self) -> _step.Scale:
        if self._scaler is None or not self._scaler.is_enabled():
            return 1.0
        # As a tensor on the device where PyTorch's GradScaler has it there: get_scale() waits for it.
        scale = getattr(self._scaler, "_scale", None)
        return scale if isinstance(scale, torch.Tensor) and scale.device == self._parameters[0].device else self._scaler.get_scale()

    def finish(self, report: StepReport, sent: List[int]) -> None:
        self.last = report
        self.passes += 1
        self.totals = self.totals.and_of(report)
        self._sent = sent
        _report.log(report, self.log_every, self.rank)

    @property
    def left_out_elements(self) -> int:
        return self.backend.left_out_elements + self.cut_elements

    @property
    def step(self) -> int:
        """Synchronised backward passes so far; those that were skipped do not count."""
        return self.backend.step if self._is_bound else self._pending["step"] if self._pending is not None else 0

    # --- what happened -----------------------------------------------------------------------------------------------------

    def held_parameters(self) -> FrozenSet[str]:
        """Names of the parameters of which no element arrived in the last step; none before the first."""
        return frozenset(self.names[layer] for layer in self._held())

    def held_tensors(self) -> List[torch.nn.Parameter]:
        """The same parameters themselves."""
        return [self._parameters[layer] for layer in self._held()]

    def _held(self) -> List[int]:
        if self.last is None:
            return []
        arrived = {self.layer_of_fragment[fragment] for fragment in self._sent}
        return [layer for layer in range(len(self.names)) if layer not in arrived]

    def residual(self, name: str) -> torch.Tensor:
        """What of a parameter's gradients waits on this rank: float32, a copy in the shape of the parameter. KeyError. With backend "cuda" as
        costly as state_dict()."""
        self._require_bound("residual")
        if name not in self.names:
            raise KeyError(f"there is no parameter {name!r} that requires a gradient")
        layer = self.names.index(name)
        return torch.as_strided(self.backend.residual(layer), self.shapes[layer], self.strides[layer]).clone()

    def add_scalars(self, writer: Any, global_step: int, prefix: str = "lamina") -> None:
        """The last step's numbers to whatever has TensorBoard's add_scalar(tag, value, step)."""
        if self.last is not None:
            _report.add_scalars(self.last, writer, global_step, prefix)

    # --- checkpoints -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> Dict[str, Any]:
        """All that a later step of this rank depends on. Each rank saves its own, between backward passes: the residual is the
        only copy of what was not sent. `torch.load(..., weights_only=True)` reads it. Warns if a framework asks that keeps one rank's
        state for all; per_rank() is for those."""
        if self._pending is not None:
            return self._pending
        self._require_bound("state_dict")
        if self._overlapped is not None:  # of an interrupted backward
            self._give_up()
        if self.world_size > 1:
            warn_of_saver("the residual of layer dropping")
        memory = torch.frombuffer(bytearray(self.backend.save()), dtype=torch.uint8)
        return {"format": FORMAT, "lamina": lamina.__version__, "options": dataclasses.asdict(self.options),
                "world_size": self.world_size, "rank": self.rank, "names": list(self.names), "shapes": self.shapes,
                "strides": self.strides, "step": self.step, "totals": dataclasses.asdict(self.totals),
                "last_choice": self.last_choice, "overlap": self.overlap, "plan": self.plan,
                "memory": memory, "checksum": checksum_of(self.rank, memory)}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Goes on where this rank of the same model was saved, bit for bit. If other parameters required a gradient then, residuals are
        carried over by name, and a warning says which begin with nothing and which are left out.

        Raises:
            ValueError: and nothing changed, for a state of another rank, without a common name, with other shapes, strides, number of
                ranks, fragments or momentum, another format, or a residual that is damaged or another rank's. Other options may differ: a
                warning says so, and the new ones count.
        """
        self._require_bound("load_state_dict")
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            found = state.get("format") if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"load_state_dict: the format is {found}, this version reads {FORMAT}")
        missing = [field for field in ("names", "shapes", "strides", "world_size", "rank", "options", "totals", "last_choice",
                                       "plan", "memory", "checksum") if field not in state]
        if missing:
            raise ValueError(f"load_state_dict: the state has no '{missing[0]}'")
        totals = Totals(**state["totals"])
        if set(self.names).isdisjoint(state["names"]):
            raise ValueError(f"load_state_dict: {_difference('names', self.names, state['names'], None)}")
        for field in ("shapes", "strides"):
            theirs = dict(zip(state["names"], state[field]))
            for name, own_one in zip(self.names, getattr(self, field)):
                if theirs.get(name, own_one) != own_one:
                    raise ValueError(f"load_state_dict: of '{name}', {_difference(field, own_one, theirs[name], None)}")
            if len(state[field]) != len(theirs):
                raise ValueError(f"load_state_dict: there are {len(state[field])} {field} and {len(theirs)} names in the saved state")
        if state["world_size"] != self.world_size:
            raise ValueError(f"load_state_dict: saved by one of {state['world_size']} ranks, and there are {self.world_size}; "
                             "give all saved states to merge_states")
        if state["rank"] not in (self.rank, None):
            raise ValueError(f"load_state_dict: saved by rank {state['rank']}, and this is rank {self.rank}: each rank's residual "
                             "is its own, and each loads what it saved")
        if state.get("overlap", False) != self.overlap:
            raise ValueError(f"load_state_dict: overlap was {not self.overlap} and is {self.overlap}")
        own = dataclasses.asdict(self.options)
        for field in ("fragment_elements", "momentum"):
            saved, now = state["options"][field], own[field]
            if saved != now and (field == "fragment_elements" or (saved == 0) != (now == 0)):
                raise ValueError(f"load_state_dict: {field} was {saved} and is {now}")
        require_unmixed("load_state_dict", state, state["memory"])
        if self._overlapped is not None:  # of an interrupted backward
            self._give_up()
        try:
            memory = memoryview(state["memory"].cpu().contiguous().numpy())
            self.backend.load(memory if state["names"] == self.names else memoryview(self._by_name(state, memory)))
        except ValueError as error:
            raise ValueError(f"load_state_dict: {error}") from error
        changed = {name: (state["options"][name], value) for name, value in own.items() if state["options"].get(name) != value}
        for name, (saved, now) in changed.items():
            logger.warning("%s was %s in the saved state and is %s now", name, saved, now)
        self.last_choice = state["last_choice"]
        self.plan = state["plan"] if state["names"] == self.names else None
        self.totals = totals
        self.last, self._sent = None, []

    def _by_name(self, state: Dict[str, Any], memory: memoryview) -> bytes:
        """The memory of a state whose parameters are others, as that of these."""
        kept = {name: state["options"][name] for name in ("fragment_elements", "momentum")}
        theirs = lamina.Layout(dict(zip(state["names"], state["shapes"])))
        own = lamina.Layout(dict(zip(self.names, self.shapes)))
        step, residual, velocity, _ = lamina.Selector(theirs, **kept).load(memory)

        def carried(numbers: Any) -> Optional[torch.Tensor]:
            if not len(numbers):
                return None
            of = dict(zip(state["names"], torch.split(torch.frombuffer(numbers, dtype=torch.float32), theirs.sizes)))
            return torch.cat([of[name] if name in of else torch.zeros(size) for name, size in zip(self.names, own.sizes)])

        moved = carried(residual)
        assert moved is not None
        logger.warning("the saved state is of other parameters: %s begin without a residual, and that of %s is left out",
                       sorted(set(self.names) - set(state["names"])) or "none", sorted(set(state["names"]) - set(self.names)) or "none")
        selector = lamina.Selector(own, **kept)
        expected = torch.full((len(selector.fragments),), torch.inf, dtype=torch.float64)
        return selector.save(step, moved, carried(velocity), expected)

    def __repr__(self) -> str:
        if not self._is_bound:
            return f"LayerDropping({self.options}, no model)"
        return (f"LayerDropping({self.options}, rank {self.rank} of {self.world_size}, {self.step} steps, "
                f"{100 * self.totals.ratio:.1f} % of the bytes)")

    def __getstate__(self) -> Dict[str, Any]:
        kept: Dict[str, Any] = {"options": self.options, "nonfinite": self.nonfinite, "wire": self.wire, "backend": self._backend_name,
                "overlap": self.overlap, "max_norm": self.max_norm, "log_every": self.log_every}
        had = [name for name, value in (("scaler", self._scaler), ("process_group", self._given_group)) if value is not None]
        return {"arguments": kept, "had": had + self._had, "state": self.state_dict() if self._is_bound else self._pending}

    def __setstate__(self, kept: Dict[str, Any]) -> None:
        LayerDropping.__init__(self, **kept["arguments"])
        self._pending, self._had = kept["state"], kept["had"]

    def _require_bound(self, what: str) -> None:
        if not self._is_bound:
            raise RuntimeError(f"{what}: the state has no model; call bind() before")


def _difference(field: str, first: Any, second: Any, rank: Optional[int]) -> str:
    where = ("here", "in the saved state") if rank is None else ("on rank 0", f"on rank {rank}")
    if isinstance(first, list) and isinstance(second, list):
        if len(first) != len(second):
            return f"there are {len(first)} {field} {where[0]} and {len(second)} {where[1]}"
        index = next(i for i, (one, other) in enumerate(zip(first, second)) if one != other)
        field, first, second = f"{field}[{index}]", first[index], second[index]
    return f"{field} is {first!r} {where[0]} and {second!r} {where[1]}"


def refuse_sharded(module: torch.nn.Module) -> None:
    """TypeError for a module of FSDP, of the first or the second kind, or one that holds such."""
    names = {kind.__name__ for each in module.modules() for kind in type(each).__mro__}
    if names & {"FullyShardedDataParallel", "FSDPModule"}:
        raise TypeError(_FSDP_REFUSED)
