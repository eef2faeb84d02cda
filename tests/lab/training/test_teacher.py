"""Teachers: what a student learns from them, and which networks cannot teach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("sklearn")

import conformallayers as cl
from conformallayers.lab.training.config import make_config
from conformallayers.lab.training.teacher import Teacher, loss_sum
from conformallayers.lab.training.train import train
from runs import few_digits
from training import QUIET, assert_same_weights

STUDENT: dict[str, Any] = {"epochs": 2, "batch_size": 64, "threads": 1, "console": QUIET}


def pupil(out: Path, **options: Any) -> Any:
    return train("LeNetCL", few_digits(), out=out, **{**STUDENT, **options})


def test_loss_without_a_teacher_is_the_cross_entropy() -> None:
    scores, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    assert loss_sum(scores, labels, None) == F.cross_entropy(scores, labels, reduction="sum")


def test_loss_of_a_teacher_is_the_divergence_of_softened_scores() -> None:
    scores, taught = torch.randn(2, 4, 3, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 1])
    p, q = (taught / 4).softmax(1), (scores / 4).softmax(1)
    divergence = (p * (p / q).log()).sum()
    hard = -scores.log_softmax(1)[range(4), labels].sum()
    expected = 0.1 * hard + 0.9 * 16 * divergence
    torch.testing.assert_close(loss_sum(scores, labels, taught), expected)
    # No gradient from the teacher's part where both agree.
    same = scores.clone().requires_grad_()
    (loss_sum(same, labels, scores)).backward()
    wanted = scores.clone().requires_grad_()
    (0.1 * F.cross_entropy(wanted, labels, reduction="sum")).backward()
    torch.testing.assert_close(same.grad, wanted.grad)


def test_student_learns_from_a_run_and_its_record_names_the_teacher(
    finished: Any, tmp_path: Path
) -> None:
    alone = pupil(tmp_path / "alone")
    taught = pupil(tmp_path / "taught", teacher=str(finished.folder))
    assert taught.row["teacher"] == str(finished.folder)
    assert f"--teacher {finished.folder}" in taught.row["command"]
    assert taught.history[-1]["loss"] != alone.history[-1]["loss"]
    # The student follows the teacher more closely than one that never saw it.
    images = torch.rand(64, 3, 32, 32)
    teacher = Teacher(str(finished.folder), make_config(network="LeNetCL", dataset="digits"))
    wanted = teacher(images).softmax(1)
    apart = [(run.model.eval()(images).softmax(1) - wanted).norm() for run in (alone, taught)]
    assert apart[1] < apart[0]


def test_a_stopped_student_resumes_to_the_same_bits(finished: Any, tmp_path: Path) -> None:
    teacher = str(finished.folder)
    whole = pupil(tmp_path / "whole", teacher=teacher)
    pupil(tmp_path / "parts", teacher=teacher, epochs=1)
    resumed = pupil(tmp_path / "parts", teacher=teacher, resume=True)
    assert_same_weights(whole.folder, resumed.folder)


def test_a_changed_teacher_is_refused_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "teacher.safetensors"
    cl.save(cl.networks.LeNetCL(), path)
    run = tmp_path / "run"
    pupil(run, teacher=str(path), epochs=1)
    cl.save(cl.networks.LeNetCL(), path)
    with pytest.raises(
        cl.ConformalError, match=r"the file of the teacher as before, got a changed"
    ):
        pupil(run, teacher=str(path), resume=True)


def test_folds_teach_too(tmp_path: Path) -> None:
    folded = cl.fold(cl.networks.StageNet("nano"), (3, 32, 32))
    cl.save(folded, tmp_path / "fold.safetensors")
    config = make_config(network="LeNetCL", dataset="digits")
    images = torch.rand(3, 3, 32, 32)
    taught = Teacher(str(tmp_path / "fold.safetensors"), config)(images)
    assert torch.equal(taught, folded(images))
    assert not taught.requires_grad


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (cl.networks.LeNetCL(num_classes=7), (3, 32, 32), "expected 10 classes, got 7"),
        (nn.Sequential(cl.ConformalLayers(cl.Conv2d(1, 2, 3)), nn.Flatten()), (1, 8, 8), "images"),
        (cl.ConformalLayers(cl.Conv2d(3, 10, 30)), (3, 32, 32), "10 classes, got 10×3×3"),
    ],
    ids=["classes", "shape", "maps"],
)
def test_networks_for_other_images_or_classes_cannot_teach(
    tmp_path: Path, model: nn.Module, shape: tuple[int, ...], message: str
) -> None:
    path = tmp_path / "teacher.safetensors"
    cl.save(cl.fold(model, shape), path)
    with pytest.raises(cl.ConformalError, match=f"train --teacher .*{message}"):
        pupil(tmp_path / "run", teacher=str(path))
    assert not (tmp_path / "run").exists()


def test_a_teacher_of_other_classes_is_refused_by_name(tmp_path: Path) -> None:
    path, names = tmp_path / "teacher.safetensors", [f"kind {index}" for index in range(10)]
    cl.save(cl.networks.LeNetCL(), path, labels=names)
    with pytest.raises(cl.ConformalError, match=r"the classes 0, 1, .*, got kind 0, kind 1"):
        pupil(tmp_path / "run", teacher=str(path))
    assert not (tmp_path / "run").exists()


def test_a_teacher_with_another_white_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "teacher.safetensors"
    cl.save(cl.networks.LeNetCL(), path, about={"white": 255})
    with pytest.raises(cl.ConformalError, match="with white 1, got 255"):
        Teacher(str(path), make_config(network="LeNetCL", dataset="digits"))


@pytest.mark.parametrize("folded", [True, False], ids=["fold", "model"])
def test_teachers_compute_in_their_own_dtype(tmp_path: Path, folded: bool) -> None:
    model = cl.networks.LeNetCL(dtype=torch.float64).eval()
    network = cl.fold(model, (3, 32, 32)) if folded else model
    cl.save(network, tmp_path / "teacher.safetensors")
    config = make_config(network="LeNetCL", dataset="digits")
    images = torch.rand(3, 3, 32, 32)
    taught = Teacher(str(tmp_path / "teacher.safetensors"), config)(images)
    torch.testing.assert_close(taught, network(images.double()).float(), check_dtype=True)


def test_a_teacher_is_named_by_a_word(tmp_path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=r"train --teacher: expected a valid string, got 5"):
        pupil(tmp_path / "run", teacher=5)


def test_a_teacher_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(cl.ConformalError, match=r"train --teacher nobody: .*no such file"):
        pupil(tmp_path / "run", teacher="nobody")
    assert not (tmp_path / "run").exists()
