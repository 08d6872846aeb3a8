"""What a policy's steps cost on a device: rates become times of a simulated step."""

from __future__ import annotations

from dataclasses import dataclass

from polyneuron.kernels.simulation import CacheKind, StepFlag
from polyneuron.scenarios.device_model import CpuModel, DeviceModel
from polyneuron.scenarios.engine_settings import Policy
from polyneuron.scenarios.model_shape import ModelShape

PS = 1e12
NS = 1e9
SHARE = 65536
TAIL_SHARE = 1 << 32


@dataclass(frozen=True, slots=True)
class PolicyTraits:
    """How a policy differs from the others."""

    cache: CacheKind
    flags: StepFlag
    is_shared: bool
    """Several cores issue reads; else one core does nothing else."""
    uses_npu: bool = False
    is_sparse: bool = True
    """Predictors name the neurons; else every one is computed."""


BARRIER, TWO_PHASE = StepFlag.BARRIER, StepFlag.TWO_PHASE
NO_FLAG = StepFlag(0)
TRAITS = {
    Policy.MMAP: PolicyTraits(CacheKind.NONE, NO_FLAG, True, is_sparse=False),
    Policy.BASELINE: PolicyTraits(CacheKind.NONE, NO_FLAG, True, is_sparse=False),
    Policy.LLMFLASH: PolicyTraits(CacheKind.WINDOW, BARRIER, True),
    Policy.BUNDLES: PolicyTraits(CacheKind.NONE, BARRIER, True),
    Policy.CACHE: PolicyTraits(CacheKind.NEURON, BARRIER | TWO_PHASE, True),
    Policy.PIPELINE: PolicyTraits(CacheKind.NEURON, TWO_PHASE, False),
    Policy.POWERINFER2: PolicyTraits(CacheKind.NEURON, TWO_PHASE, False, uses_npu=True),
}


@dataclass(frozen=True, slots=True)
class Conditions:
    """What events change while a run goes on."""

    cpu: float = 1.0
    """Share of its speed that the CPU runs at."""
    flash: float = 1.0
    """Reads take so many times as long."""
    stall_ns: int = 0
    """Flash stalls: how long each lasts,"""
    stall_every: int = 0
    """and how many reads there are to one that stalls; 0: none does."""
    has_npu: bool = True


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of one policy, model and device under some conditions; times in ns unless it says."""

    device: DeviceModel
    shape: ModelShape
    traits: PolicyTraits
    now: Conditions
    is_resident: bool
    """All of feed forward is in memory: nobody reads."""
    file_bytes: int
    """What reads spread over: feed forward in the file."""
    queue_depth: int
    workers: int = 0
    """0: all cores of the device."""

    @property
    def cpu(self) -> CpuModel:
        """The device's."""
        return self.device.cpu

    @property
    def uses_npu(self) -> bool:
        """Whether dense clusters run on the NPU now."""
        return self.traits.uses_npu and self.now.has_npu and self.device.npu is not None

    @property
    def num_cores(self) -> int:
        """Cores that compute; a reader of its own takes one."""
        cores = self.workers or self.cpu.cores
        if not (self.is_resident or self.traits.is_shared):
            cores -= 1
        return max(1, cores)

    @property
    def cores_share(self) -> float:
        """Of the cores that the device's rates are of."""
        return min(1.0, self.num_cores / self.cpu.cores)

    def dense_rate(self) -> float:
        """Bytes a second of dense kernels, by CPU and NPU if both are there."""
        cpu = self.cpu.bandwidth * self.cpu.dense_share * self.now.cpu
        if not self.uses_npu or self.device.npu is None:
            return cpu * min(1.0, 1.2 * self.cores_share)
        return max(cpu, self.device.npu.joint_bandwidth * self.device.npu.dense_share)

    def dense_ns(self, num_bytes: float) -> int:
        """Dense weights, read once."""
        return round(num_bytes * NS / self.dense_rate())

    def attention_ns(self, kv_tokens: int) -> int:
        """One layer, over so many tokens of all sequences."""
        keys = kv_tokens * self.shape.kv_token / self.shape.layers
        return self.dense_ns(self.shape.attention + keys) + round(self.cpu.layer_ns)

    def outside_ns(self) -> int:
        """A step beyond its layers: head, sampling, hand-off."""
        return self.dense_ns(self.shape.head) + round(self.cpu.step_ns / self.now.cpu)

    def prefill_ns(self, tokens: int) -> int:
        """A chunk of a prompt, of weights that are there."""
        npu = self.device.npu if self.uses_npu else None
        rate = npu.prefill_macs if npu else self.cpu.prefill_macs * self.now.cpu
        weights = sum(self.shape.layer_weights) * self.shape.layers
        return round(tokens * weights * NS / rate) + self.outside_ns()

    def npu_ns(self, hot_neurons: int) -> int:
        """The hot neurons of one expert (or layer), by the NPU alone."""
        npu = self.device.npu
        if npu is None or not hot_neurons:
            return 0
        rate = npu.bandwidth * npu.dense_share
        return round(hot_neurons * self.shape.neuron_bytes * NS / rate + npu.call_ns)

    def joint(self) -> int:
        """How much slower CPU and NPU are together, of 2^16."""
        npu = self.device.npu
        if npu is None:
            return SHARE
        return round(SHARE * max(1.0, (self.cpu.bandwidth + npu.bandwidth) / npu.joint_bandwidth))

    def row_ps(self, matrices: float) -> float:
        """One neuron's rows in so many matrices, by one core."""
        return matrices * (self.shape.row + self.shape.scales) * PS / self.core_rate()

    def core_rate(self) -> float:
        """Bytes a second of one core over scattered rows."""
        return self.cpu.core_rate * self.now.cpu

    def read_ps(self, read_bytes: int) -> int:
        """The command queue's time for one read."""
        depth = min(self.queue_depth, self.device.storage.depth)
        command, moving = self.command_ns, self.moving_ns(read_bytes)
        turn = command + moving
        latency = self.device.storage.latency_ns
        turn = max(turn, latency / (depth - 1)) if depth > 1 else turn + latency
        return round(turn * 1000 * self.now.flash)

    @property
    def latency_ns(self) -> float:
        """Of a read alone, beyond its place in the queue."""
        return self.device.storage.latency_ns * self.now.flash

    @property
    def command_ns(self) -> float:
        """The command queue's time for a read, whatever its size."""
        return self.device.storage.command_ns(self.file_bytes, self.traits.is_shared)

    def moving_ns(self, read_bytes: float) -> float:
        """The time of a read's bytes; less than a page costs as much as one."""
        return self.device.storage.moving_ns(read_bytes, self.traits.is_shared)

    @property
    def merge_gap(self) -> int:
        """How far apart missing neurons may lie in the file to be read as one: as long as moving
        what lies between them takes no longer than another command."""
        if not self.device.storage.merges:
            return 0
        if self.traits.is_shared:
            return 1  # the system's block layer joins what lies side by side, nobody else does
        return 1 + int(self.command_ns / self.moving_ns(self.shape.bundle))

    @property
    def reads(self) -> tuple[int, int]:
        """Bytes of a neuron's first and second read; one read when it is not in two phases."""
        first, second = self.shape.first_read, self.shape.second_read
        if self.traits.flags & TWO_PHASE and second:
            return first, second
        return first + second, 0

    @property
    def flags(self) -> StepFlag:
        """The policy's; nothing is read in two phases where one read brings all of a neuron."""
        flags = self.traits.flags
        return flags if self.reads[1] else flags & ~TWO_PHASE

    @property
    def tail(self) -> tuple[int, float]:
        """How much later slow reads are, and their share: stalls take the place of the device's."""
        if self.now.stall_every:
            return self.now.stall_ns, 1.0 / self.now.stall_every
        storage = self.device.storage
        return round(storage.tail_ns * self.now.flash), storage.tail_share

    @property
    def slow_share(self) -> int:
        """The share of slow reads, of 2^32."""
        return min(TAIL_SHARE - 1, round(self.tail[1] * TAIL_SHARE))

    def cluster_costs(self, hot_neurons: int) -> dict[str, int]:
        """All fields of `struct cluster_costs` but attention's."""
        cpu = self.cpu
        width, others = self.shape.hidden, self.shape.matrices - 1
        token_ps = width * PS / (cpu.core_macs * self.now.cpu)
        gate = self.shape.activity.gate
        first, second = self.reads
        kept = not self.is_resident
        return {
            "predict": round(self.shape.predictor_neuron * PS * self.cpu.cores /
                             (cpu.bandwidth * cpu.dense_share * self.now.cpu)),
            "gate_row": round(self.row_ps(1)),
            "up_down_row": round(self.row_ps(others) * gate),
            "gate_token": round(token_ps),
            "up_down_token": round(token_ps * others * gate),
            "neuron": round(cpu.neuron_ns * 1000 / self.now.cpu) if kept else 0,
            "miss": round(cpu.miss_ns * 1000 / self.now.cpu),
            "first_read": self.read_ps(first) if first else 0,
            "second_read": self.read_ps(second) if second else 0,
            "run_read": round(self.command_ns * 1000 * self.now.flash),
            "run_neuron": round(self.moving_ns(self.shape.bundle) * 1000 * self.now.flash),
            "latency_ns": round(self.latency_ns),
            "tail_ns": self.tail[0],
            "tail_share": self.slow_share,
            "barrier_ns": round(cpu.barrier_ns / self.now.cpu),
            "attention_ns": 0,
            "npu_ns": self.npu_ns(hot_neurons),
            "hot_ns": 0,
            "joint": self.joint(),
        }  # fmt: skip
