"""The arena: no two values that are needed at the same time overlap, and it is hardly larger than they are."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from conformallayers.recipe.c.export import WRITE, write
from conformallayers.recipe.c.memory import Buffer, arrange
from conformallayers.recipe.simplify import simplified
from recipe_cases import RECIPE_CASES


def overlap(a: Buffer, b: Buffer) -> bool:
    return a.start < b.start + b.size and b.start < a.start + a.size


def needed(buffers: list[Buffer]) -> int:
    """Return the most floats that are needed at the same time."""
    times = {buffer.first for buffer in buffers}
    return max((sum(b.size for b in buffers if b.first <= t <= b.last) for t in times), default=0)


@pytest.mark.parametrize("seed", range(20))
def test_random_lifetimes(seed: int) -> None:
    draw = random.Random(seed)
    buffers = []
    for _ in range(draw.randint(1, 30)):
        first = draw.randint(0, 20)
        buffers.append(Buffer("work", draw.randint(1, 100), first, first + draw.randint(0, 8)))
    total = arrange(buffers)
    assert total == max(buffer.start + buffer.size for buffer in buffers)
    assert needed(buffers) <= total <= 1.4 * needed(buffers)
    for a, b in combinations(buffers, 2):
        if max(a.first, b.first) <= min(a.last, b.last):
            assert not overlap(a, b)


def test_programs_keep_every_value_as_long_as_it_is_read() -> None:
    checked = 0
    for case in RECIPE_CASES:
        recipe = simplified(case.build())
        if any(type(operation) not in WRITE for operation in recipe.operations):
            continue
        program = write(recipe)
        every = list(enumerate(recipe.operations))
        written = {name: i for i, op in every for name in op.outputs}
        read = {name: i for i, op in every for name in op.inputs} | {recipe.output: len(every)}
        lives = [
            (buffer, min(written[v] for v in buffer.values), max(read[v] for v in buffer.values))
            for buffer in program.buffers
            if buffer.values and all(name in read for name in buffer.values)
        ]
        for (a, first, last), (b, begin, end) in combinations(lives, 2):
            if first <= end and begin <= last:
                assert not overlap(a, b), case.name
                checked += 1
        assert program.work_size >= needed(program.buffers)
    assert checked > 50
