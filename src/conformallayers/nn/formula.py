"""Formulas of scalars, by which an activation says how it changes t; no torch is needed to read them.

A function is traced by calling it with variables. The formula prints as text, which recipes and files hold, and
every runtime evaluates it with its own functions.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
FUNCTIONS = ("sqrt", "exp", "log", "tanh")
_NODES = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_TENSOR_METHODS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "true_divide": "/"}
_STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2}  # of operators, for parentheses
_LONGEST = 4000  # characters of a text
_POWERS = range(1, 9)  # that are written as products


_Method = Callable[["Formula", Any], "Formula"]


def _binary(head: str) -> tuple[_Method, _Method]:
    """Return an operator as a method, and with its operands exchanged."""
    return (
        lambda left, right: Formula(head, (left, _formula(right))),
        lambda right, left: Formula(head, (_formula(left), right)),
    )


def _unary(head: str) -> Callable[[Formula], Formula]:
    """Return a function as a method."""
    return lambda x: Formula(head, (x,))


@dataclass(frozen=True)
class Formula:
    """A number, a variable, or an operator or function of formulas; see ``FUNCTIONS``.

    Examples:
        >>> q = Formula("q")
        >>> growth = (1 + q / 4).sqrt()
        >>> print(growth)
        sqrt(1 + q / 4)
        >>> parse("sqrt(1 + q / 4)") == growth
        True
        >>> import math
        >>> growth.evaluate({"q": 12.0}, vars(math))
        2.0
    """

    head: str | float
    operands: tuple[Formula, ...] = ()

    def evaluate(
        self,
        values: Mapping[str, Any],
        functions: Mapping[str, Callable[..., Any]],
        number: Callable[[float], Any] = float,
    ) -> Any:
        """Return the value for the given variables.

        Args:
            values: of the variables.
            functions: by the names in ``FUNCTIONS``, and operators that replace those of Python.
            number: converts a number of the formula.
        """
        if not isinstance(self.head, str):
            return number(self.head)
        if not self.operands:
            return values[self.head]
        found = [operand.evaluate(values, functions, number) for operand in self.operands]
        run = functions[self.head] if self.head in functions else OPERATORS[self.head]
        return run(*found)

    def heads(self) -> set[str | float]:
        """Return all numbers, variables, operators and functions."""
        return {self.head}.union(*(operand.heads() for operand in self.operands))

    def __str__(self) -> str:
        if not isinstance(self.head, str):
            return f"{self.head!r}".removesuffix(".0") if self.head >= 0 else f"({self.head!r})"
        if self.head in OPERATORS:
            left, right = self.operands
            strength = _STRENGTH[self.head]
            first = f"({left})" if _STRENGTH.get(str(left.head), 3) < strength else f"{left}"
            last = f"({right})" if _STRENGTH.get(str(right.head), 3) <= strength else f"{right}"
            return f"{first} {self.head} {last}"
        return f"{self.head}({self.operands[0]})" if self.operands else self.head

    __add__, __radd__ = _binary("+")
    __sub__, __rsub__ = _binary("-")
    __mul__, __rmul__ = _binary("*")
    __truediv__, __rtruediv__ = _binary("/")

    def __neg__(self) -> Formula:
        return 0.0 - self

    def __pow__(self, power: Any) -> Formula:
        number = _formula(power).head
        if number == 0.5:
            return self.sqrt()
        if number in _POWERS:
            found: Formula = reduce(operator.mul, [self] * int(number))
            return found
        return Formula("*", (self.log(), _formula(power))).exp()

    sqrt, exp, log, tanh = map(_unary, FUNCTIONS)

    def square(self) -> Formula:
        """Return the square."""
        return self * self

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), options: Any = None) -> Any:
        """Trace ``torch.sqrt(q)``, ``parameter * q`` and the like."""
        name = function.__name__.strip("_")
        if options or not (name in (*FUNCTIONS, "square", "pow") or name in _TENSOR_METHODS):
            raise TypeError(f"{name} is not one of + - * / and {', '.join(FUNCTIONS)}")
        first, *others = args
        if name in _TENSOR_METHODS:
            return OPERATORS[_TENSOR_METHODS[name]](_formula(first), *others)
        return getattr(_formula(first), "__pow__" if name == "pow" else name)(*others)


def _formula(value: Any) -> Formula:
    """Return a formula, or a number or a tensor of one number as a formula."""
    if isinstance(value, Formula):
        return value
    if isinstance(value, bool) or getattr(value, "shape", ()) not in ((), (1,)):
        raise TypeError(f"a formula takes single numbers, not {value!r:.60}")
    number = float(value.item() if hasattr(value, "item") else value)
    if not math.isfinite(number):
        raise TypeError(f"a formula takes finite numbers, not {number}")
    return Formula(number)


@lru_cache(maxsize=256)
def parse(text: str) -> Formula:
    """Return the formula of a text.

    Raises:
        ValueError: the text is not a formula.
    """
    try:
        if len(text) > _LONGEST:
            raise ValueError("too long")
        return _read(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r:.60} is not a formula") from error


def _read(node: ast.expr) -> Formula:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _formula(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _read(node.operand)
        return Formula(-inner.head) if isinstance(inner.head, float) else -inner
    if isinstance(node, ast.Name):
        return Formula(node.id)
    if isinstance(node, ast.BinOp) and type(node.op) in _NODES:
        return Formula(_NODES[type(node.op)], (_read(node.left), _read(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        name, (operand,) = node.func.id, node.args
        if name in FUNCTIONS:
            return Formula(name, (_read(operand),))
    raise ValueError(ast.dump(node))
