"""The versor products of the supplement, done literally by a geometric-algebra library."""

import math
from functools import lru_cache

import numpy as np
import pytest
import torch
from kingdon import Algebra

import conformallayers as cl

CASES = [(d, alpha, seed) for d in (1, 2, 3) for alpha in (0.4, 1.0, 3.0) for seed in (0, 1)]
# The printed coefficients of V''' have the opposite sign of the product, all of them: one point.
SIGN = -1.0
cases = pytest.mark.parametrize(("d", "alpha", "seed"), CASES)


@lru_cache
def algebra(d):
    # e_1 … e_{d+1}, then e₊ (square +1) and e₋ (square −1).
    return Algebra(signature=[1] * (d + 2) + [-1])


class Conformal:
    """The conformal model of R^{d+1} and the supplement's chain of products for one point."""

    def __init__(self, d, alpha, v, t):
        space = algebra(d)
        unit = [space.vector(list(row)) for row in np.eye(d + 3)]
        *self.e, plus, minus = unit
        self.origin, self.infinity = (minus - plus) / 2, minus + plus
        self.d, self.alpha, self.t, self.v = d, alpha, t, self.euclidean(v)
        flat = self.origin ^ self.infinity
        half = math.log(2 / alpha) / 2
        self.V = self.v + t * self.origin + (t / 2) * float(np.sum((v / t) ** 2)) * self.infinity
        self.T = (math.cosh(half) + math.sinh(half) * flat) * (alpha * self.e[d] + self.origin)
        self.T_inverse = (self.e[d] / alpha + self.origin / alpha**2) * (
            math.cosh(half) - math.sinh(half) * flat
        )
        self.V1 = self.V ^ self.infinity
        self.V2 = self.T * self.V1 * self.T_inverse
        self.H = self.infinity.lc(self.V2)
        self.centre = -(self.T * self.infinity * self.T_inverse)
        self.found = -(self.H * self.centre * self.H)
        self.V3 = self.project(self.found ^ self.infinity)
        self.Y = (-(alpha**2) / (2 * t)) * self.V3

    def euclidean(self, v):
        return sum((float(c) * e for c, e in zip(v, self.e, strict=False)), 0 * self.e[0])

    def flat_coefficients(self, blade):
        """Split A ∧ e_∞ into the coefficients of e_1 … e_{d+1} and of e_o in A."""
        points = [-float(self.origin.sp(e.lc(blade)).e) for e in self.e]
        return np.array(points), float(self.origin.sp(self.infinity.lc(blade)).e)

    def vector_coefficients(self, vector):
        """Return the coefficients of e_1 … e_{d+1}, of e_o and of e_∞."""
        points = [float(vector.sp(e).e) for e in self.e]
        at_origin = -float(vector.sp(self.infinity).e)
        return np.array(points), at_origin, -float(vector.sp(self.origin).e)

    def project(self, blade):
        """Drop the part along e_{d+1}: the orthographic projection."""
        points, _ = self.flat_coefficients(blade)
        return blade - float(points[self.d]) * (self.e[self.d] ^ self.infinity)


def sample(d, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=d), float(rng.uniform(1.3, 3.0) if seed % 2 else rng.uniform(0.2, 0.7))


def euclidean_respro(point, alpha):
    """Reflect in the sphere of radius α centred at (0, …, 0, α), scale by 2/α, project."""
    lifted = np.append(point, 0.0)
    centre = np.append(np.zeros_like(point), alpha)
    ray = lifted - centre
    reflected = centre + alpha**2 * ray / (ray @ ray)
    return ((2 / alpha) * reflected)[:-1]


@cases
def test_embedding_is_a_null_vector_and_the_printed_inverse_is_one(d, alpha, seed):
    model = Conformal(d, alpha, *sample(d, seed))
    assert abs(float((model.V * model.V).e)) <= 1e-12 * float(np.sum(np.square(model.V.values())))
    product = model.T * model.T_inverse
    assert float(product.e) == pytest.approx(1, rel=1e-12)
    assert max(abs(float(c)) for c in (product - product.grade(0)).values()) <= 1e-12


@cases
def test_printed_e_o_coefficient_has_one_factor_too_many(d, alpha, seed):
    v, t = sample(d, seed)
    model = Conformal(d, alpha, v, t)
    points, at_origin, at_infinity = model.vector_coefficients(SIGN * model.found)
    n = float(v @ v)
    np.testing.assert_allclose(points[:d], -2 * t / alpha**2 * v, rtol=1e-12)
    assert points[d] == pytest.approx(-2 * n / alpha**3, rel=1e-12)
    assert at_infinity == pytest.approx(-2 * n / alpha**3, rel=1e-12)
    printed_energy, printed_square = n * t / alpha**3, t**2 / alpha
    assert at_origin == pytest.approx(-(printed_energy / t + printed_square), rel=1e-12)
    assert at_origin != pytest.approx(-(printed_energy + printed_square), rel=1e-3)
    flat_points, flat_origin = model.flat_coefficients(SIGN * model.V3)
    np.testing.assert_allclose(flat_points[:d], points[:d], rtol=1e-12)
    assert flat_origin == pytest.approx(at_origin, rel=1e-12)


@cases
def test_both_forms_agree_at_one(d, alpha, seed):
    v, _ = sample(d, seed)
    model = Conformal(d, alpha, v, 1.0)
    points, at_origin = model.flat_coefficients(SIGN * model.Y)
    assert at_origin == pytest.approx(alpha / 2 + float(v @ v) / (2 * alpha), rel=1e-12)
    x, t = torch.from_numpy(v)[None], torch.ones(1, dtype=torch.float64)
    for projective in (False, True):
        y = cl.functional.project(*cl.functional.respro(x, t, alpha, projective=projective))
        np.testing.assert_allclose(y[0].numpy(), points[:d] / at_origin, rtol=1e-12)
    np.testing.assert_allclose(cl.ReSPro(alpha)(x)[0].numpy(), points[:d] / at_origin, rtol=1e-12)


@cases
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_library_euclid_and_versors_give_one_point(d, alpha, seed, dtype):
    v, t = sample(d, seed)
    v, t = v.astype(np.float32).astype(float), float(np.float32(t))
    model = Conformal(d, alpha, v, t)
    points, at_origin = model.flat_coefficients(SIGN * model.Y)
    np.testing.assert_allclose(points[:d], v, rtol=1e-12)
    assert abs(points[d]) <= 1e-12
    n = float(v @ v)
    assert at_origin == pytest.approx(alpha / 2 * t + n / (2 * alpha * t), rel=1e-12)
    assert at_origin != pytest.approx(alpha / 2 * t + n / (2 * alpha), rel=1e-3)
    expected = euclidean_respro(v / t, alpha)
    np.testing.assert_allclose(points[:d] / at_origin, expected, rtol=1e-12)
    x, t = torch.from_numpy(v)[None].to(dtype), torch.tensor([t], dtype=dtype)
    x_out, t_out = cl.functional.respro(x, t, alpha, projective=True)
    y = cl.functional.project(x_out, t_out)
    rtol = 1e-12 if dtype == torch.float64 else 1e-6
    np.testing.assert_allclose(t_out.numpy(), at_origin, rtol=rtol)
    np.testing.assert_allclose(y[0].numpy(), expected, rtol=rtol)
    published = cl.functional.project(*cl.functional.respro(x, t, alpha))
    gap = torch.linalg.vector_norm(published - y) / torch.linalg.vector_norm(y)
    assert gap > 1e-3
