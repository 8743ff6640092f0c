"""Rules of Fourier transforms: correctness for every role, texts."""

from __future__ import annotations

import warnings

import pytest
import torch

import fshard as fs
from fshard.partition.apply import apply
from tests.helpers.ops.samples import Sample, rand, rule_errors, rule_text

aten = torch.ops.aten
COMPLEX = torch.complex128
REAL = (
    "fft_fft fft_ifft fft_rfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_fftn fft_ifftn fft_rfftn"
)
HALF = "fft_irfft fft_hfft fft_irfft2 fft_hfft2 fft_irfftn fft_hfftn"

OTHERS: dict[str, Sample] = {
    "sizes of the last dims": lambda: (aten.fft_fftn, rand(3, 4, 5), [4]),
    "sizes and dims": lambda: (aten.fft_fftn, rand(3, 4, 5), [4, 3], [0, 2]),
    "a dim in the middle": lambda: (aten.fft_rfft, rand(3, 4, 5), 6, 1),
    "_fft_c2c": lambda: (aten._fft_c2c, rand(3, 4, dtype=COMPLEX), [1], 0, True),
    "_fft_c2c of none": lambda: (aten._fft_c2c, rand(3, 4, dtype=COMPLEX), [], 0, True),
    "_fft_r2c": lambda: (aten._fft_r2c, rand(3, 4), [0], 0, True),
    "_fft_c2r": lambda: (aten._fft_c2r, rand(3, 4, dtype=COMPLEX), [1], 0, 6),
    "prims.fft_r2c": lambda: (torch.ops.prims.fft_r2c, rand(3, 4), {"dim": [1], "onesided": True}),
    "prims.fft_c2r": lambda: (torch.ops.prims.fft_c2r, rand(3, 4, dtype=COMPLEX),
                              {"dim": [1], "last_dim_size": 6}),
    "shifted": lambda: (aten.fft_fftshift, rand(3, 4)),
    "shifted back": lambda: (aten.fft_ifftshift, rand(3, 4), [1]),
    "stft": lambda: (aten.stft.center, rand(3, 32), 8, 4, 8, hann(), {"return_complex": True}),
    "stft of one": lambda: (aten.stft, rand(32), 8, 4, 8, hann(), False, True, True),
}  # fmt: skip


def hann() -> torch.Tensor:
    return torch.hann_window(8, dtype=torch.float64)


@pytest.mark.parametrize("name", REAL.split())
def test_transforms_of_real_signals(name: str) -> None:
    assert rule_errors(lambda: (getattr(aten, name), rand(3, 4, 5))) == []


@pytest.mark.parametrize("name", [*HALF.split(), "fft_fft"])
def test_transforms_of_complex_signals(name: str) -> None:
    assert rule_errors(lambda: (getattr(aten, name), rand(3, 4, 5, dtype=COMPLEX))) == []


@pytest.mark.parametrize("name", OTHERS)
def test_shifts_and_windows(name: str) -> None:
    assert rule_errors(OTHERS[name], grad=not name.startswith("prims")) == []


@pytest.mark.parametrize("whole", [(3, 5, 9), (5, 9)])
def test_istft_equals_one_device(whole: tuple[int, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert rule_errors(lambda: (aten.istft, rand(*whole, dtype=COMPLEX), 8, 4)) == []
        window = torch.hann_window(8, dtype=torch.float64)
        call = lambda: (aten.istft, rand(*whole, dtype=COMPLEX), 8, 2, None, window)  # noqa: E731
        assert rule_errors(call) == []


def test_unreduced_integers_are_not_accepted() -> None:
    """Integer partial sums wrap, their transforms do not."""
    assert rule_text(aten.fft_fft, rand(3, 4, dtype=torch.int32)) == "b1->b1"


def test_rule_texts() -> None:
    assert rule_text(aten.fft_rfft, rand(3, 4, 5), None, 1) == (
        "b1d->b1d  {unreduced 0 sum; unreduced 0 avg}"
    )
    assert rule_text(aten.fft_fftshift, rand(3, 4), [0]) == (
        "bc->bc  {b permuted; unreduced 0 sum; unreduced 0 avg; unreduced 0 max; "
        "unreduced 0 min; unreduced 0 product}"
    )
    assert rule_text(*OTHERS["stft"]()).startswith("b1,1->b11  {unreduced 0 sum; unreduced 0 avg; ")


def test_unreduced_signals_stay_unreduced() -> None:
    mesh = fs.Mesh(x=2, y=2)
    spec = fs.Spec(mesh, fs.P("x", unreduced={"y"}), shape=(4, 8))
    parts = tuple(rand(2, 8, dtype=torch.float32, seed=rank) for rank in range(4))
    result = apply(torch.fft.fft, (parts, spec))
    assert str(result.spec) == "c64[4@x,8]{unreduced: y}"


@pytest.mark.parametrize("name", ["fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn"])
def test_transforms_over_sharded_dims_transpose_between_dims(name: str) -> None:
    """No rank holds more than its share; gathers would have it hold all."""
    mesh = fs.Mesh(x=2, y=2)
    torch.manual_seed(0)
    transform = getattr(torch.fft, name.removeprefix("fft_"))
    x = torch.randn(8, 8, 8, dtype=torch.float64 if name == "fft_rfftn" else COMPLEX)
    for sizes, dim in ((None, None), ((6, -1), (0, 1))):
        part = fs.partition(lambda x, s=sizes, d=dim: transform(x, s, d, "ortho"), mesh=mesh,
                            in_specs=fs.P("x", "y"))  # fmt: skip
        operands = [x.clone().requires_grad_() for _ in range(2)]
        results = part(operands[0]), transform(operands[1], sizes, dim, "ortho")
        torch.testing.assert_close(*results)
        grads = [
            torch.autograd.grad(y.abs().pow(3).sum(), x)[0]
            for y, x in zip(results, operands, strict=True)
        ]
        torch.testing.assert_close(*grads)
        call = part.trace(x)
        assert call.cost().peak_memory <= x.nbytes // 2, str(call)
        assert "all_gather" not in str(call)


def test_gradients_of_transforms_in_the_function_stay_sharded() -> None:
    x = torch.randn(8, 8, 8, dtype=torch.float64)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: torch.fft.fftn(x).abs().pow(3).sum())(x)

    part = fs.partition(gradient, mesh=fs.Mesh(x=2, y=2), in_specs=fs.P("x", "y"))
    torch.testing.assert_close(part(x), gradient(x))
    assert part.trace(x).cost().peak_memory <= 2 * x.nbytes // 2


@pytest.mark.parametrize("whole", [(2, 96), (96,)])
def test_windows_of_a_sharded_signal_exchange_halos(whole: tuple[int, ...]) -> None:
    """Each rank transforms windows of its part; aten's own padding is that of `torch.stft`."""
    window, x = torch.hann_window(12, dtype=torch.float64), rand(*whole).requires_grad_()
    mesh, partition = fs.Mesh(x=3), fs.P(*[None] * (len(whole) - 1), "x")
    calls: list[Sample] = [
        lambda: (torch.stft, x, 16, 4, 12, window, {"return_complex": True, "normalized": True}),
        lambda: (torch.stft, x, 16, 8, None, None, False, "reflect", False, False, True),
        lambda: (aten.stft.center, x, 16, 5, 12, {"pad_mode": "constant", "return_complex": True}),
    ]
    for sample in calls:
        op, _, *args = sample()
        options = args.pop() if isinstance(args[-1], dict) else {}
        with warnings.catch_warnings(), fs.comm_log() as log:
            warnings.simplefilter("ignore")
            run = lambda x, op=op, args=args, options=options: op(x, *args, **options)  # noqa: E731
            y = fs.partition(run, mesh=mesh, in_specs=partition)(fs.shard(x, mesh, partition))
            expected = run(x)
        assert {name for name, _ in log.bytes} == {"halo_exchange"}
        results = [(z, *torch.autograd.grad(z.abs().pow(3).sum(), x))
                   for z in (fs.unshard(y), expected)]  # fmt: skip
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
