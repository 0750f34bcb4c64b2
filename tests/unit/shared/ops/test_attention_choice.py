"""Who computes attention of prompts: the fastest of those that agree."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

import pytest
import torch

from shared.ops.attention import SequenceSpan, paged_attention
from shared.ops.attention_choice import (
    AttentionUnavailableError,
    choose_attention,
)
from shared.ops.context import gather_context
from shared.ops.flash_attention_4 import MODULE, load_flash_attention_4
from shared.ops.forward_ops import TorchOps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from shared.ops.attention_choice import AttentionName, GatheredAttention

OURS_US = 100.0
RESULT = torch.linspace(-1, 1, 24).view(3, 4, 2)


def kernels(out: Callable[[], Tensor]) -> Callable[[], GatheredAttention]:
    """Return what loads kernels that bring something."""
    return lambda: lambda _query, _context, _scale: out()


def missing() -> GatheredAttention:
    raise AttentionUnavailableError("flash-attn-4 is not installed")


def trial(us: float) -> Callable[[GatheredAttention | None], tuple[float, Tensor]]:
    """Return a trial in which libraries take `us` and ours take `OURS_US`."""

    def run(library: GatheredAttention | None) -> tuple[float, Tensor]:
        if library is None:
            return OURS_US, RESULT
        return us, library(RESULT, RESULT, 1.0)

    return run


def test_the_faster_one_is_taken() -> None:
    """With both figures, which a log tells."""
    libraries = {"flash-attn-4": kernels(lambda: RESULT * 1.001)}
    library, choice = choose_attention("auto", libraries, trial(80.0))
    assert library is not None
    assert (choice.name, choice.because) == ("flash-attn-4", "the fastest")
    assert choice.measured_us == {"torch": OURS_US, "flash-attn-4": 80.0}


def test_a_slower_library_is_left() -> None:
    """What is installed is no reason to use it."""
    library, choice = choose_attention(
        "auto", {"flash-attn-4": kernels(lambda: RESULT)}, trial(120.0)
    )
    assert library is None
    assert (choice.name, choice.because) == ("torch", "flash-attn-4 is slower")


def test_a_slower_library_is_taken_where_it_is_asked_for() -> None:
    """Who names one has measured something else."""
    library, choice = choose_attention(
        "flash-attn-4", {"flash-attn-4": kernels(lambda: RESULT)}, trial(120.0)
    )
    assert library is not None
    assert (choice.name, choice.because) == ("flash-attn-4", "asked for")


def test_torch_is_taken_untried_where_it_is_asked_for() -> None:
    """Which is the way out where a library is broken: it is not even imported."""
    library, choice = choose_attention("torch", {"flash-attn-4": missing}, trial(1.0))
    assert (library, choice.name, choice.because) == (None, "torch", "asked for")


def explode() -> Tensor:
    raise AssertionError("SplitKV not supported on SM 9.0\nand much more")


@pytest.mark.parametrize(
    ("load", "because"),
    [
        (missing, "flash-attn-4 is not installed"),
        (kernels(explode), "flash-attn-4 fails: AssertionError: SplitKV not supported on SM 9.0"),
        (kernels(RESULT.flatten), r"flash-attn-4 returns \[24\], not \[3, 4, 2\]"),
        (kernels(lambda: RESULT.roll(1, 0)), "flash-attn-4 computes something else: it is off by"),
        (
            kernels(lambda: RESULT * float("nan")),
            "flash-attn-4 computes something else: it is off by nan",
        ),
    ],
)
def test_a_library_that_cannot_be_used_is_left_with_its_reason(
    load: Callable[[], GatheredAttention], because: str
) -> None:
    """And is an error only where it was asked for by name."""
    _, choice = choose_attention("auto", {"flash-attn-4": load}, trial(1.0))
    assert choice.name == "torch"
    with pytest.raises(AttentionUnavailableError, match=because) as raised:
        choose_attention("flash-attn-4", {"flash-attn-4": load}, trial(1.0))
    assert str(raised.value) == choice.because


def test_what_a_compiler_warns_of_is_not_passed_on() -> None:
    """A daemon's log would have it, and nobody could do anything about it."""

    def warning() -> Tensor:
        warnings.warn("argument 17 is not supported", UserWarning, stacklevel=1)
        return RESULT

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, choice = choose_attention("auto", {"flash-attn-4": kernels(warning)}, trial(80.0))
    assert choice.name == "flash-attn-4"


def test_a_cpu_has_no_libraries() -> None:
    """`auto` is no error there, a name is."""
    kv_layer = torch.zeros(4, 2, 1, 2, 8)

    def prepare(attention: AttentionName) -> str:
        return (
            TorchOps()
            .prepare_prefill(
                kv_layer,
                num_heads=2,
                max_query_len=2,
                max_context_len=4,
                attention=attention,
            )
            .name
        )

    assert prepare("auto") == prepare("torch") == "torch"
    with pytest.raises(AttentionUnavailableError, match="flash-attn-4 is for GPUs"):
        prepare("flash-attn-4")


class TestTheBorderToFlashAttention4:
    """What is on the other side is a package, here one with the library's name and signature."""

    @pytest.fixture
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Return the file of a module that will be imported in the library's place."""
        path = tmp_path.joinpath(*MODULE.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True)
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in [name for name in sys.modules if name.startswith("flash_attn")]:
            monkeypatch.delitem(sys.modules, name)
        return path

    def test_it_is_given_tokens_before_heads_and_ends_with_the_last_query(
        self, package: Path
    ) -> None:
        """Queries, keys and values of one sequence, whose mask ends with the last of both."""
        package.write_text(
            "import torch\n"
            "def flash_attn_func(q, k, v, *, softmax_scale, causal):\n"
            "    q, k, v = (each.transpose(1, 2) for each in (q, k, v))\n"
            "    mask = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]).bool()\n"
            "    out = torch.nn.functional.scaled_dot_product_attention(\n"
            "        q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True)\n"
            "    return out.transpose(1, 2), None\n"
        )
        kv_layer = torch.randn(5, 2, 2, 4, 8)
        query = torch.randn(6, 4, 8)
        span = SequenceSpan(
            query_start=0, query_len=6, context_len=14, block_table=torch.tensor([4, 1, 3, 2])
        )
        context = gather_context(kv_layer, span.block_table, 14, padded_len=14)
        out = load_flash_attention_4()(query, context, 0.3)
        torch.testing.assert_close(out, paged_attention(query, kv_layer, [span], scale=0.3))

    @pytest.mark.parametrize(
        ("source", "because"),
        [
            ("import cutlass_of_another_name", "not installed whole: cutlass_of_another_name is"),
            ("raise OSError('libcudart.so.11: no')", "cannot be imported: OSError: libcudart"),
            ("flash_attn_varlen_func = None", "cannot be imported: AttributeError: "),
        ],
    )
    def test_what_does_not_fit_is_told(self, package: Path, source: str, because: str) -> None:
        """Half an installation, libraries of another CUDA, another version."""
        package.write_text(source + "\n")
        with pytest.raises(AttentionUnavailableError, match=because):
            load_flash_attention_4()

    def test_what_is_missing_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """By the name under which it is installed."""
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        for name in [name for name in sys.modules if name.startswith("flash_attn")]:
            monkeypatch.delitem(sys.modules, name)
        with pytest.raises(AttentionUnavailableError, match=r"^flash-attn-4 is not installed$"):
            load_flash_attention_4()
