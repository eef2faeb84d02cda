"""Write an activation of your own: one formula trains, folds, and runs in numpy and ONNX Runtime."""

import tempfile

import torch
from torch import Tensor

import conformallayers as cl
import conformallayers.numpy as cln


class RadialTanh(cl.RadialActivation):
    """Apply a hyperbolic tangent to the length of a point p: ``‖p‖ ← tanh(‖p‖/α)``."""

    def growth(self, q: Tensor) -> Tensor:
        """Return the divisor u/tanh(u) of the point for u = √q = ‖p‖/α."""
        u = (q + 1e-12).sqrt()
        return u / u.tanh()


point = torch.tensor([[3.0, 4.0]])  # of length 5
print(f"length {RadialTanh(alpha=2.5)(point).norm():.4f}, tanh(2) = {torch.tensor(2.0).tanh():.4f}")

model = cl.ConformalLayers(
    cl.Conv2d(1, 4, 3), RadialTanh(), cl.Conv2d(4, 4, 3), RadialTanh("learned")
)
cl.testing.assert_folds(model, (1, 8, 8))

folded, x = cl.fold(model, (1, 8, 8)), torch.rand(5, 1, 8, 8)
with tempfile.TemporaryDirectory() as folder:
    cl.save(folded, f"{folder}/net.safetensors")
    in_numpy = cln.load(f"{folder}/net.safetensors")(x.numpy())
    cl.export_onnx(folded, f"{folder}/net.onnx")  # compares ONNX Runtime with torch
print(f"numpy agrees: {torch.allclose(torch.from_numpy(in_numpy), folded(x), rtol=1e-5)}")
