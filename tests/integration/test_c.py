"""cl.export_c: the program compiles without a warning and computes what torch computes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import conformallayers as cl
from conformallayers.testing import relative_error
from nets import NETS, OFFSETS, SHAPE, features, net
from oracle import randomise
from support import folds as all_folds
from support import samples

COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
FLAGS = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O2"]
STRICT = ["-pedantic", "-Wconversion", "-Wdouble-promotion", "-Wshadow"]
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover", "-g"]
LIMIT = 512 * 1024
KEPT = ("biases", "branches", "linear branches", "residual")  # whose layers only torch can run

MAIN = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
{includes}
typedef int (*with)(const float *, float *, float *);
typedef int (*plain)(const float *, float *);
static const struct {{ with a; plain b; size_t in, out, work; }} models[] = {{ {rows} }};

/* Memory of the exact size, so that a sanitizer sees every step beside it. */
int main(int count, char **words)
{{
    const size_t k = count > 1 ? (size_t)atoi(words[1]) : 0;
    const size_t in = models[k].in * sizeof(float), out = models[k].out * sizeof(float);
    float *x = (float *)malloc(in), *y = (float *)malloc(out), *z = (float *)malloc(out);
    float *work = (float *)malloc(models[k].work * sizeof(float));
    while (fread(x, in, 1, stdin) == 1) {{
        const int32_t a = models[k].a(x, y, work), b = models[k].b(x, z);
        if (a != b || memcmp(y, z, out) != 0)
            return 1;
        fwrite(&a, sizeof a, 1, stdout);
        fwrite(y, out, 1, stdout);
    }}
    free(x);
    free(y);
    free(z);
    free(work);
    return 0;
}}
"""
Run = Callable[[Tensor], tuple[Tensor, Tensor]]


def compiled(folder: Path, exports: list[cl.CExport], *flags: str) -> list[Run]:
    """Compile programs into one and return a function for each: a batch → indices, outputs."""
    rows = []
    for export in exports:
        macro = export.name.upper()
        functions = f"{export.name}_predict_with, {export.name}_predict"
        rows.append(f"{{{functions}, {macro}_INPUT_SIZE, {macro}_OUTPUT_SIZE, {macro}_WORK_SIZE}}")
    includes = "#include <stdint.h>\n" + "".join(f'#include "{e.name}.h"\n' for e in exports)
    (folder / "main.c").write_text(MAIN.format(includes=includes, rows=", ".join(rows)))
    sources = [export.source.name for export in exports]
    command = [str(COMPILER), *FLAGS, *flags, "main.c", *sources, "-lm", "-o", "program"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    def runner(index: int) -> Run:
        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            data = x.flatten(1).float().numpy().astype("<f4").tobytes()
            command = [str(folder / "program"), str(index)]
            done = subprocess.run(command, input=data, capture_output=True, check=False)
            assert done.returncode == 0, done.stderr.decode()
            words = np.frombuffer(done.stdout, "<i4").reshape(len(x), -1)
            outputs = words[:, 1:].copy().view("<f4")
            return torch.from_numpy(words[:, 0].copy()), torch.from_numpy(outputs)

        return run

    return [runner(index) for index in range(len(exports))]


def one(folder: Path, folded: cl.Folded, *flags: str, **options: Any) -> tuple[cl.CExport, Run]:
    export = cl.export_c(folded, folder, **options)
    return export, compiled(folder, [export], *flags)[0]


def check(run: Run, folded: cl.Folded, x: Tensor, limit: float) -> None:
    """Compare with torch: NaN for NaN, and the index of the largest output."""
    expected = folded(x.to(folded.dtype)).flatten(1)
    index, actual = run(x)
    spoiled = expected.isnan().any(1) | x.flatten(1).isnan().any(1)
    assert (index[spoiled] == -1).all()
    assert actual[spoiled].isnan().all()
    assert relative_error(actual[~spoiled], expected[~spoiled]) < limit
    assert torch.equal(index[~spoiled].long(), actual[~spoiled].argmax(1))


def hard(shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Return samples of every size, a zero one, and some with NaN and infinity."""
    x = samples(shape, torch.float32, batch=11)
    flat = x.flatten(1)
    x[1] = 0
    flat[2, 3], flat[3, 0], flat[4, 5] = float("nan"), float("inf"), -float("inf")
    for index, size in enumerate((1e-30, 1e-3, 1e3, 1e30, 1e-42), 5):
        x[index] *= size
    return x


# -- the numbers --------------------------------------------------------------------------------


def geometries() -> Mapping[str, tuple[nn.Module, tuple[int, ...]]]:
    """Networks whose layers use every number of a convolution."""
    line = [cl.Conv1d(2, 4, 3, stride=2, padding=2, dilation=2), cl.ReSPro()]
    line += [cl.Conv1d(4, 6, 2, padding="same", groups=2), cl.ReSPro(), cl.AvgPool1d(2)]
    plane = [cl.Conv2d(2, 4, (3, 2), stride=(1, 2), padding=(2, 1)), cl.ReSPro()]
    plane += [cl.AvgPool2d(3, 2, padding=1), cl.Conv2d(4, 2, 2), cl.ReSPro()]
    block = [cl.Conv3d(1, 2, (2, 3, 2), padding=1), cl.ReSPro(projective=True)]
    block += [cl.AvgPool3d((1, 2, 2)), cl.Conv3d(2, 3, 2, dilation=(1, 2, 1)), cl.Gnomonic()]
    odd = [cl.AdaptiveAvgPool2d((4, 3)), cl.ReSPro(), nn.Upsample(scale_factor=2), cl.Scale(0.3)]
    odd += [cl.ReSPro(), nn.PixelShuffle(1), cl.AvgPool2d(3, ceil_mode=True), cl.ReSPro()]
    bare = [cl.ReSPro(2.0), cl.Flatten(), cl.ReSPro(0.5), cl.Linear(12, 3)]
    shapes = {"line": (2, 17), "plane": (2, 9, 8), "block": (1, 4, 7, 6), "odd": (2, 7, 7)}
    stacks = {"line": line, "plane": plane, "block": block, "odd": odd, "bare": bare}
    return {n: (cl.ConformalLayers(*s), shapes.get(n, (3, 4))) for n, s in stacks.items()}


@needs_compiler
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", [*NETS, *geometries()])
def test_programs_compute_what_torch_computes(name: str, tmp_path: Path) -> None:
    if name in NETS:
        model, shape = net(name), SHAPE
    else:
        torch.manual_seed(0)
        model, shape = geometries()[name]
        randomise(model)
    exports, folds = [], []
    for strategy, folded in all_folds(model, shape).items():
        try:
            exports.append(cl.export_c(folded, tmp_path, name=f"by_{strategy}"))
        except cl.ConformalError:
            assert strategy == "spectral"
            continue
        folds.append(folded)
        assert exports[-1].output_error < 1e-6
        assert exports[-1].agreement == 1
    assert any(folded.strategy.startswith("dense") for folded in folds)
    runs = compiled(tmp_path, exports, *STRICT)
    for run, folded in zip(runs, folds, strict=True):
        check(run, folded, hard(shape), 1e-5)


@needs_compiler
def test_programs_step_beside_no_memory(tmp_path: Path) -> None:
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    command = [str(COMPILER), *SANITIZED, probe.name, "-o", "probe"]
    if subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode:
        pytest.skip("the compiler has no sanitizers")
    chosen = {
        "chain": ("dense", "conv"),
        "rules": ("dense",),
        "biases": ("dense",),
        "branches": ("dense",),
        "several": ("layers",),
        "unpadded": ("banded", "conv"),
    }
    exports, folds = [], []
    for name, strategies in chosen.items():
        for strategy in strategies:
            folded = cl.fold(net(name), SHAPE, strategy=strategy)
            for dtype in ("float32", "int8")[: 1 if name in KEPT else 2]:
                label = f"{name}_{strategy}_{dtype}"
                exports.append(cl.export_c(folded, tmp_path, name=label, dtype=dtype))
                folds.append(folded)
    runs = compiled(tmp_path, exports, *SANITIZED)
    for run, folded, export in zip(runs, folds, exports, strict=True):
        check(run, folded, hard(), 1e-5 if export.dtype == "float32" else 0.2)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_folds_of_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    model = net("calls")
    folded = cl.fold(model, SHAPE, strategy="dense", dtype=dtype)
    _, run = one(tmp_path, folded)
    x = samples(SHAPE, torch.float32)
    exact = cl.fold(model, SHAPE, strategy="dense", dtype=torch.float64)(x.double())
    assert relative_error(run(x)[1], exact) < (1e-6 if dtype == torch.float64 else 5e-3)


@needs_compiler
def test_deep_networks_stay_in_range(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stages = [m for _ in range(60) for m in (cl.Conv2d(2, 2, 3, padding=1), cl.ReSPro())]
    biased = [m for _ in range(9) for m in (cl.Conv2d(2, 2, 1, bias=True), cl.ReSPro())]
    exports, folds = [], []
    for name, layers in (("deep", stages), ("biased", biased)):
        folds.append(cl.fold(cl.ConformalLayers(*layers), SHAPE, strategy="dense"))
        exports.append(cl.export_c(folds[-1], tmp_path, name=name))
    for run, folded in zip(compiled(tmp_path, exports), folds, strict=True):
        check(run, folded, hard(), 1e-5)


@needs_compiler
@pytest.mark.parametrize("strategy", ["dense", "conv"])
@pytest.mark.parametrize("offset", OFFSETS)
def test_a_mean_image_is_subtracted(offset: str, strategy: str, tmp_path: Path) -> None:
    head = nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3)
    model = nn.Sequential(OFFSETS[offset](), randomise(features()) or features(), *head)
    folded = cl.fold(model, SHAPE, strategy=strategy)
    _, run = one(tmp_path, folded)
    x = hard()
    check(run, folded, x[(x.flatten(1).abs().amax(1) > 1e-2) | x.isnan().flatten(1).any(1)], 1e-5)
    zero = torch.zeros(1, *SHAPE)
    assert relative_error(run(zero)[1], model.eval()(zero).detach()) < 1e-5


@needs_compiler
def test_the_network_of_the_recipe(tmp_path: Path) -> None:
    torch.manual_seed(0)
    centre = cl.Centre((3, 32, 32))
    centre.mean.copy_(torch.rand(3, 32, 32))
    network = cl.networks.LeNetCL(alpha="spectral", projective=True, gain=100.0)
    model = nn.Sequential(OrderedDict(centre=centre, network=network))
    model(torch.rand(2, 3, 32, 32))
    folded = cl.fold(model, (3, 32, 32), strategy="conv")
    export, run = one(tmp_path, folded)
    check(run, folded, torch.rand(4, 3, 32, 32), 1e-5)
    assert export.constant_bytes < LIMIT


# -- int8 and tolerances ------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("strategy", ["dense", "banded", "sparse", "conv", "layers"])
def test_errors_of_int8_are_those_of_the_program(strategy: str, tmp_path: Path) -> None:
    folded = cl.fold(net("calls"), SHAPE, strategy=strategy)
    x = samples(SHAPE, torch.float32, batch=40)
    export, run = one(tmp_path, folded, dtype="int8", samples=x)
    _, y = run(x)
    expected = folded(x)
    assert relative_error(y, expected) == pytest.approx(export.output_error, rel=1e-2)
    share = (y.argmax(1) == expected.argmax(1)).double().mean()
    assert float(share) == pytest.approx(export.agreement, abs=0.03)
    assert 1e-5 < export.output_error < 0.05
    assert export.denominator_error is not None
    assert 0 < export.denominator_error < 0.01
    exact = cl.export_c(folded, tmp_path, name="exact", samples=x.numpy())
    assert exact.output_error < 1e-6
    assert exact.denominator_error == 0
    assert export.constant_bytes < 0.5 * exact.constant_bytes
    header = export.header.read_text("ascii")
    assert f"{export.output_error:.2g}" in header
    assert f"{export.denominator_error:.2g}" in header
    assert "same largest output in" in header
    assert str(export).splitlines()[-1] == export.measured


def lenet(*, head: bool, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    network = cl.networks.LeNetCL(**options)
    end = [network] if head else [network.features, nn.Flatten(), nn.Linear(400, 10)]
    model = nn.Sequential(nn.ZeroPad2d(2), cl.RepeatChannels(3), *end)
    model(torch.rand(2, 1, 28, 28))
    return model.eval()


@needs_compiler
@pytest.mark.parametrize(
    ("head", "strategy"),
    [
        (True, "auto"),
        (False, "dense"),
        *(
            pytest.param(head, strategy, marks=pytest.mark.slow)
            for head in (True, False)
            for strategy in ("dense", "banded", "sparse", "conv", "layers")
        ),
    ],
)
def test_a_28_by_28_model_takes_at_most_512_kib(head: bool, strategy: str, tmp_path: Path) -> None:
    model = lenet(head=head)
    folded = cl.fold(model, (1, 28, 28), strategy=strategy, tolerance=1e-2, max_norm=28.0)
    exports = [cl.export_c(folded, tmp_path, name=t, dtype=t) for t in ("float32", "int8")]
    x = torch.rand(4, 1, 28, 28)
    for export, run in zip(exports, compiled(tmp_path, exports), strict=True):
        command = [str(COMPILER), *FLAGS, "-c", export.source.name, "-o", "model.o"]
        subprocess.run(command, cwd=tmp_path, check=True)
        assert export.constant_bytes + export.work_bytes < LIMIT
        assert (tmp_path / "model.o").stat().st_size < LIMIT
        assert relative_error(run(x)[1], folded(x)) < 1e-2
    proof = exports[0].certificate
    assert proof is not None
    assert (proof.epsilon, proof.max_norm) == (1e-2, 28.0)
    assert "#define FLOAT32_EPSILON 0x1.47ae147ae147bp-7\n" in exports[0].header.read_text("ascii")


@pytest.mark.parametrize(
    "options",
    [{}, {"projective": True}, {"projective": True, "alpha": 0.3}],
    ids=["published", "projective", "strong"],
)
def test_denominators_stay_within_the_tolerance(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    stages = cl.Conv2d(1, 3, 3), cl.ReSPro(**options), cl.Conv2d(3, 3, 3), cl.ReSPro(**options)
    model = cl.ConformalLayers(*stages, cl.Conv2d(3, 2, 5), cl.ReSPro(**options), cl.Flatten())
    folded = cl.fold(model, (1, 16, 16), strategy="dense", tolerance=1e-2, max_norm=20.0)
    x = torch.randn(200, 1, 16, 16)
    smooth = nn.functional.avg_pool2d(x, 5, 1, 2)
    checkers = x[:1] * 0 + (-1.0) ** (torch.arange(16)[:, None] + torch.arange(16))
    x = torch.cat([x, smooth, checkers, x[:1] * 0 + 1, torch.eye(256).view(-1, 1, 16, 16)])
    norms = torch.linalg.vector_norm(x.flatten(1), dim=1).view(-1, 1, 1, 1)
    x = x / norms * torch.linspace(0.01, 20, len(x)).view(-1, 1, 1, 1)
    export = cl.export_c(folded, tmp_path, samples=x)
    whole = cl.export_c(cl.fold(model, (1, 16, 16), strategy="dense"), tmp_path, name="whole")
    assert export.constant_bytes < 0.95 * whole.constant_bytes
    assert export.certificate is not None
    assert export.denominator_error is not None
    assert 0 < export.denominator_error <= 1e-2
    assert whole.certificate is None or whole.certificate.epsilon < 1e-6


# -- constants ----------------------------------------------------------------------------------


# -- names, compilers, files --------------------------------------------------------------------


@needs_compiler
def test_the_default_name_has_the_short_functions(tmp_path: Path) -> None:
    folded = cl.fold(net("calls"), SHAPE, strategy="dense")
    export = cl.export_c(folded, tmp_path)
    assert (export.header.name, export.source.name) == ("cl_model.h", "cl_model.c")
    other = cl.export_c(folded, tmp_path, name="other")
    assert "cl_predict" not in other.header.read_text("ascii")
    main = tmp_path / "short.c"
    main.write_text(
        '#include "cl_model.h"\n#include "other.h"\n'
        "int main(void)\n{\n    static float x[CL_INPUT_SIZE], y[CL_OUTPUT_SIZE], w[CL_WORK_SIZE];\n"
        "    static const int shape[] = CL_MODEL_INPUT_SHAPE;\n    x[3] = 1;\n"
        "    return cl_predict(x, y) != other_predict(x, y) || shape[0] != 2 ||\n"
        "           cl_predict_with(x, y, w) != cl_model_predict(x, y) ||\n"
        "           sizeof CL_MODEL_VERSION < 2 || sizeof CL_MODEL_ORIGIN != 72;\n}\n"
    )
    command = [
        str(COMPILER),
        *FLAGS,
        *STRICT,
        "short.c",
        "cl_model.c",
        "other.c",
        "-lm",
        "-o",
        "short",
    ]
    subprocess.run(command, cwd=tmp_path, check=True)
    subprocess.run([str(tmp_path / "short")], check=True)


@needs_compiler
def test_the_example_runs(tmp_path: Path) -> None:
    folded = cl.fold(net("calls"), SHAPE, strategy="dense")
    cl.export_c(folded, tmp_path)
    main = Path(__file__).parents[2] / "examples" / "c" / "main.c"
    command = [
        str(COMPILER),
        *FLAGS,
        *STRICT,
        "-I.",
        str(main),
        "cl_model.c",
        "-lm",
        "-o",
        "classify",
    ]
    subprocess.run(command, cwd=tmp_path, check=True)
    x = samples(SHAPE, torch.float32)
    x[1, 0, 0, 0] = float("nan")
    run = [str(tmp_path / "classify")]
    said = subprocess.run(run, input=x.numpy().tobytes(), capture_output=True, check=True).stdout
    lines = said.decode().splitlines()
    assert lines[1].startswith("-1 ")
    expected = folded(x)[[0, 2, 3]]
    found = [[float(word) for word in lines[index].split()] for index in (0, 2, 3)]
    assert [int(row[0]) for row in found] == expected.argmax(1).tolist()
    assert relative_error(torch.tensor(found)[:, 1:], expected) < 1e-4


@needs_compiler
@pytest.mark.parametrize("name", ["calls", "biases"])
def test_programs_are_cpp_too(name: str, tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    folded = cl.fold(net(name), SHAPE, strategy="dense")
    export, run = one(tmp_path, folded)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O2", "-x", "c++"]
    command = ["c++", *flags, "main.c", export.source.name, "-x", "none", "-lm", "-o", "program"]
    subprocess.run(command, cwd=tmp_path, check=True)
    check(run, folded, hard(), 1e-5)


@needs_compiler
def test_pairs_that_do_not_belong_together_do_not_compile(tmp_path: Path) -> None:
    cl.export_c(cl.fold(net("projective"), SHAPE, strategy="dense"), tmp_path)
    header = (tmp_path / "cl_model.h").read_bytes()
    cl.export_c(cl.fold(net("chain"), SHAPE, strategy="dense"), tmp_path)

    def errors(*flags: str) -> str:
        command = [str(COMPILER), *FLAGS, *flags, "-c", "cl_model.c", "-o", "model.o"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.stderr

    assert not errors()
    assert "compile without -ffast-math" in errors("-ffast-math")
    (tmp_path / "cl_model.h").write_bytes(header)
    assert "come from different exports" in errors()


def test_equal_folds_give_equal_files(tmp_path: Path) -> None:
    texts = []
    for _ in range(2):
        made = cl.export_c(cl.fold(net("calls"), SHAPE, strategy="dense"), tmp_path)
        texts.append(made.header.read_bytes() + made.source.read_bytes())
    assert texts[0] == texts[1]
    assert max(map(len, texts[0].decode("ascii").splitlines())) <= 100


@pytest.mark.parametrize("existing", [True, False], ids=["replaced", "new"])
def test_both_files_are_written_or_none(
    existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if existing:
        (tmp_path / "cl_model.h").write_text("old header")
        (tmp_path / "cl_model.c").write_text("old source")
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if str(target).endswith(".h"):
            raise OSError(errno.ENOSPC, "no space left")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        cl.export_c(cl.fold(net("chain"), SHAPE, strategy="dense"), tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "2x", "a-b", "a b", "while", "class", "_x", "é", "a\n", 3])
def test_names_that_are_no_identifiers(name: Any, tmp_path: Path) -> None:
    folded = cl.fold(net("chain"), SHAPE, strategy="dense")
    with pytest.raises(cl.ConformalError, match=r"export_c\(name=.*expected a C identifier"):
        cl.export_c(folded, tmp_path, name=name)
    assert not list(tmp_path.iterdir())


def test_arguments_that_are_refused(tmp_path: Path) -> None:
    folded = cl.fold(net("chain"), SHAPE, strategy="dense")
    with pytest.raises(cl.ConformalError, match=r'expected "float32" or "int8", got "?\'int4'):
        cl.export_c(folded, tmp_path, dtype="int4")
    with pytest.raises(cl.ConformalError, match=r"Fold it first"):
        cl.export_c(net("chain"), tmp_path)  # type: ignore[arg-type]
    for samples_ in (torch.zeros(0, *SHAPE), torch.zeros(SHAPE), torch.full((1, *SHAPE), np.nan)):
        with pytest.raises(cl.ConformalError, match=r"export_c\(samples=\.\.\.\)"):
            cl.export_c(folded, tmp_path, samples=samples_)
    assert not list(tmp_path.iterdir())


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(1)
        return y * y


def test_what_has_no_form_in_c(tmp_path: Path) -> None:
    def refused(model: nn.Module, message: str, **options: Any) -> None:
        with pytest.raises(cl.ConformalError, match=message):
            cl.export_c(cl.fold(model, SHAPE, strategy="dense"), tmp_path, **options)

    refused(
        nn.Sequential(net("chain"), nn.Flatten(), nn.Softmax(1)),
        "operations that C has, got softmax",
    )
    refused(nn.Sequential(net("chain"), Odd()), r"operations that C has, got .*mul")
    refused(net("biases"), 'without inner biases.*dtype="float32"', dtype="int8")
    broken = cl.fold(net("chain"), SHAPE, strategy="dense")
    broken.constants.matrix[0, 0] = float("inf")
    with pytest.raises(cl.ConformalError, match=r"expected finite weights.*infinity in matrix"):
        cl.export_c(broken, tmp_path)
    spectral = cl.fold(net("circular"), SHAPE, strategy="spectral")
    with pytest.raises(cl.ConformalError, match=r'got fourier\. Fold with strategy="dense"'):
        cl.export_c(spectral, tmp_path)
    assert not list(tmp_path.iterdir())


def test_activations_of_ones_own(tmp_path: Path) -> None:
    class Own(cl.RadialActivation):
        def growth(self, q: Tensor) -> Tensor:
            return 1 + q / 2

    model = cl.ConformalLayers(cl.Conv2d(2, 2, 3), Own(1.0))
    with pytest.raises(cl.ConformalError, match=r"activations that C has, got Own"):
        cl.export_c(cl.fold(model, SHAPE, strategy="dense"), tmp_path)


def test_programs_too_large_for_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformallayers.recipe.c.export._LIMIT", 2**12)
    with pytest.raises(cl.ConformalError, match=r"at most 4 KiB of constants.*got 19.4 KiB"):
        cl.export_c(cl.fold(net("chain"), SHAPE, strategy="dense"), tmp_path)
