"""What `--npu` may say."""

from __future__ import annotations

import pytest

from polyneuron.backends import spec as module
from polyneuron.backends.spec import (
    BackendKind,
    DeviceLimits,
    Failure,
    NpuSpec,
    check_threads,
    parse_npu,
)
from polyneuron.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("native", NpuSpec(BackendKind.NATIVE)),
        ("none", NpuSpec(BackendKind.NONE)),
        ("openvino", NpuSpec(BackendKind.OPENVINO, "CPU")),
        ("openvino:NPU", NpuSpec(BackendKind.OPENVINO, "NPU")),
        ("openvino:GPU.1", NpuSpec(BackendKind.OPENVINO, "GPU.1")),
        ("native:gops=2.5", NpuSpec(BackendKind.NATIVE, limits=DeviceLimits(gops=2.5))),
        (
            "native:memory=1MiB,graphs=4,fail=nan@3",
            NpuSpec(
                BackendKind.NATIVE,
                limits=DeviceLimits(
                    memory_bytes=1 << 20, max_graphs=4, failure=Failure.NAN, fails_from=3
                ),
            ),
        ),
    ],
)
def test_forms(text: str, wanted: NpuSpec) -> None:
    assert parse_npu(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "", "npu", "Native", "openvino:", "native:", "none:CPU", "native:speed=1",
        "native:gops", "native:gops=0", "native:gops=inf", "native:gops=x", "native:memory=x",
        "native:memory=5%", "native:graphs=0", "native:graphs=-1", "native:graphs=²",
        "native:graphs=4,graphs=5", "native:fail=often", "native:fail=run@0", "native:fail=run@",
        "native:gops=1,", "native:graphs=" + "9" * 5000,
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--npu") as raised:
        parse_npu(text)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 200


class TestThreads:
    @pytest.mark.parametrize(
        ("npu", "wanted", "threads"),
        [("native", -1, 3), ("native", 0, 0), ("native", 2, 2), ("none", -1, 0), ("none", 0, 0),
         ("native:graphs=1", -1, 3)],
    )  # fmt: skip
    def test_how_many(self, npu: str, wanted: int, threads: int) -> None:
        assert check_threads(npu, wanted, automatic=3) == threads

    def test_none_with_threads(self) -> None:
        with pytest.raises(ConfigError, match=r"^-tb 2: --npu none"):
            check_threads("none", 2, automatic=3)

    def test_a_back_end_needs_one(self) -> None:
        with pytest.raises(ConfigError, match=r"^-tb 0: --npu native:graphs=1 needs a thread"):
            check_threads("native:graphs=1", 0, automatic=3)

    def test_openvino_that_is_not_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"pip install 'polyneuron\[openvino\]'"):
            check_threads("openvino", -1, automatic=3)
