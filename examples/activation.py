"""Write an activation of your own: any positive function of q that is 1 at q = 0 folds."""

import torch
from torch import Tensor

import conformallayers as cl


class RadialTanh(cl.RadialActivation):
    """Apply a hyperbolic tangent to the length of a point p: ``‖p‖ ← tanh(‖p‖/α)``."""

    def growth(self, q: Tensor) -> Tensor:
        """Return the divisor u/tanh(u) of the point for u = √q = ‖p‖/α."""
        u = q.clamp_min(1e-12).sqrt()
        return u / u.tanh()


point = torch.tensor([[3.0, 4.0]])  # of length 5
print(f"length {RadialTanh(alpha=2.5)(point).norm():.4f}, tanh(2) = {torch.tensor(2.0).tanh():.4f}")

model = cl.ConformalLayers(
    cl.Conv2d(1, 4, 3), RadialTanh(), cl.Conv2d(4, 4, 3), RadialTanh("learned")
)
cl.testing.assert_folds(model, (1, 8, 8))
