"""nvalchemi-toolkit-ops: neighbor lists, electrostatics, splines, optimizers (Warp on the CPU)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tools.third_party.step import Step

NAMESPACES = ("nvalchemiops",)


def load() -> None:
    """Imports all that registers ops."""
    import nvalchemiops.torch
    import nvalchemiops.torch.interactions.dispersion
    import nvalchemiops.torch.interactions.electrostatics
    import nvalchemiops.torch.neighbors
    import nvalchemiops.torch.spline  # noqa: F401


def _crystal(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cubic lattice of 27 charges, pushed a little off their places, neutral, periodic."""
    grid = torch.cartesian_prod(*[torch.arange(3.0, dtype=dtype)] * 3) * 2.5
    charges = torch.rand(27, dtype=dtype)
    cell = torch.eye(3, dtype=dtype)[None] * 7.5
    return (
        grid + torch.rand(27, 3, dtype=dtype) * 0.2,
        charges - charges.mean(),
        cell,
        torch.ones(1, 3, dtype=torch.bool),
    )


def _filled(matrix: torch.Tensor, counts: torch.Tensor, shifts: torch.Tensor, fill: int) -> Any:
    """Without the shifts of places that hold no neighbor: the package leaves them uninitialized."""
    return matrix, counts, shifts[matrix != fill]


def _neighbors(method: str, as_list: bool) -> Any:
    from nvalchemiops.torch.neighbors import neighbor_list

    positions, _, cell, pbc = _crystal(torch.float32)
    found = neighbor_list(
        positions,
        3.4,
        cell=cell,
        pbc=pbc,
        method=method,
        max_neighbors=64,
        return_neighbor_list=as_list,
    )
    return found if as_list else _filled(*found, 27)


def _batched_neighbors(method: str) -> Any:
    from nvalchemiops.torch.neighbors import neighbor_list

    positions, _, cell, pbc = _crystal(torch.float32)
    index = torch.arange(2, dtype=torch.int32).repeat_interleave(27)
    pointer = torch.tensor([0, 27, 54], dtype=torch.int32)
    found = neighbor_list(
        torch.cat([positions, positions * 0.9]),
        3.0,
        cell=cell.repeat(2, 1, 1),
        pbc=pbc.repeat(2, 1),
        batch_idx=index,
        batch_ptr=pointer,
        method=method,
        max_neighbors=64,
    )
    return _filled(*found, 54)


def _matrix(positions: torch.Tensor, cell: torch.Tensor, pbc: torch.Tensor) -> dict[str, Any]:
    from nvalchemiops.torch.neighbors import neighbor_list

    matrix, _, shifts = neighbor_list(
        positions.detach(), 3.6, cell=cell.detach(), pbc=pbc, method="cell_list", max_neighbors=96
    )
    return {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}


def _electrostatics(name: str, dtype: torch.dtype, backward: bool) -> Any:
    import nvalchemiops.torch.interactions.electrostatics as electrostatics

    positions, charges, cell, pbc = _crystal(dtype)
    if backward:
        positions.requires_grad_()
        charges.requires_grad_()
        cell.requires_grad_()
    near = _matrix(positions, cell, pbc)
    if name == "coulomb":
        args: dict[str, Any] = {"cell": cell, "cutoff": 3.6, "alpha": 0.3, **near}
        energy = electrostatics.coulomb_energy(positions, charges, **args)
        forces = electrostatics.coulomb_energy_forces(positions, charges, **args)
    elif name == "dsf":
        args = {"cell": cell, "cutoff": 3.6, "alpha": 0.3, **near}
        forces = electrostatics.dsf_coulomb(positions, charges, **args)
        energy = forces[0]
    elif name == "ewald":
        args = {"cell": cell, "alpha": 0.5, "k_cutoff": 3.0, **near}
        energy = electrostatics.ewald_summation(positions, charges, **args)
        forces = electrostatics.ewald_summation(
            positions, charges, compute_forces=True, compute_virial=True, **args
        )
    else:
        args = {"cell": cell, "alpha": 0.5, "mesh_dimensions": (12, 12, 12), **near}
        energy = electrostatics.particle_mesh_ewald(positions, charges, **args)
        forces = electrostatics.particle_mesh_ewald(positions, charges, compute_forces=True, **args)
    if not backward:
        return energy, forces
    wanted = [positions, charges, cell]
    grads = torch.autograd.grad(energy.sum(), wanted, create_graph=True, allow_unused=True)
    try:  # Training on forces differentiates twice; not every interaction has that formula.
        total = sum(grad.square().sum() for grad in grads if grad is not None)
        second: Any = torch.autograd.grad(total, wanted, allow_unused=True)
    except RuntimeError as error:
        second = str(error)
    return energy, grads, second


def _segments(dtype: torch.dtype) -> Any:
    import nvalchemiops.torch as ops

    index = torch.tensor([0, 0, 1, 1, 1, 3, 3], dtype=torch.int32)
    x = torch.randn(7, 3, dtype=dtype, requires_grad=True)
    y = torch.randn(7, 3, dtype=dtype, requires_grad=True)
    scale = torch.randn(4, dtype=dtype, requires_grad=True)
    matrices = torch.randn(4, 3, 3, dtype=dtype, requires_grad=True)
    results = [
        ops.segmented_sum(x, index, 4),
        ops.segmented_dot(x, y, index, 4),
        ops.segmented_mul(x, scale, index, 4),
        ops.segmented_mean(x, index, 4),
        ops.segmented_rms_norm(x[:5], index[:5], 2),
        ops.segmented_matvec(x, matrices, index, 4),
    ]
    total = sum(result.square().sum() for result in results)
    first = torch.autograd.grad(total, [x, y, scale, matrices], create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, y, scale, matrices])
    return results, first, second


def _splines() -> Any:
    import nvalchemiops.torch.spline as spline

    positions, charges, cell, _ = _crystal(torch.float64)
    positions.requires_grad_()
    charges.requires_grad_()
    mesh = spline.spline_spread(positions, charges, cell, (8, 8, 8), 4)
    potential = spline.spline_gather(positions, mesh, cell, 4)
    energy = (potential * charges).sum()
    grads = torch.autograd.grad(energy, [positions, charges])
    with torch.no_grad():
        several = spline.spline_spread_channels(
            positions, torch.rand(27, 3, dtype=torch.float64), cell, (8, 8, 8), 3
        )
        vector = spline.spline_gather_gradient(positions, charges, mesh, cell, 4)
    return mesh, potential, grads, several, vector


def _fire(dtype: torch.dtype) -> Any:
    import nvalchemiops.torch as ops

    positions = torch.randn(10, 3, dtype=dtype)
    velocities = torch.zeros_like(positions)
    index = torch.tensor([0] * 4 + [1] * 6, dtype=torch.int32)
    alpha, dt = torch.full((2,), 0.09, dtype=dtype), torch.full((2,), 0.01, dtype=dtype)
    steps = torch.zeros(2, dtype=torch.int32)
    for _ in range(20):
        ops.fire2_step_coord(
            positions, velocities, -positions, index, alpha, dt, steps, delaystep=3
        )
    return positions, velocities, alpha, dt, steps, positions._version


def _lbfgs(dtype: torch.dtype) -> Any:
    import nvalchemiops.torch as ops

    positions = torch.randn(10, 3, dtype=dtype)
    index = torch.tensor([0] * 4 + [1] * 6, dtype=torch.int32)
    state = ops.lbfgs_prepare_state(10, 2, dtype=dtype)
    stiffness = torch.arange(1, 31, dtype=dtype).reshape(10, 3)
    for _ in range(12):
        ops.lbfgs_step_coord(positions, -positions * stiffness, state, index)
    return positions, vars(state)


def _dispersion() -> Any:
    from nvalchemiops.torch.interactions.dispersion import D3Parameters, dftd3

    positions, _, cell, pbc = _crystal(torch.float32)
    kinds = 4
    parameters = D3Parameters(
        rcov=torch.rand(kinds) + 0.5,
        r4r2=torch.rand(kinds) + 1,
        c6ab=torch.rand(kinds, kinds, 5, 5) * 10,
        cn_ref=torch.rand(kinds, kinds, 5, 5) * 4,
    )
    numbers = torch.randint(1, kinds, (27,), dtype=torch.int32)
    return dftd3(
        positions,
        numbers,
        a1=0.4,
        a2=4.0,
        s8=0.8,
        d3_params=parameters,
        cell=cell,
        compute_virial=True,
        **_matrix(positions, cell, pbc),
    )


def _compiled() -> Any:
    import nvalchemiops.torch as ops

    def pooled(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ weight)
        return ops.segmented_sum(y, index, 4) + ops.segmented_mean(y, index, 4)

    compiled = torch.compile(pooled, backend="aot_eager")
    index = torch.tensor([0, 0, 1, 1, 1, 3, 3], dtype=torch.int32)
    found = []
    for _ in range(3):
        weight = torch.randn(3, 3, requires_grad=True)
        y = compiled(torch.randn(7, 3), weight, index)
        found.append((y, *torch.autograd.grad(y.square().sum(), weight)))
    return found


def _wrong_dtype() -> Any:
    import nvalchemiops.torch as ops

    return ops.segmented_sum(torch.ones(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32), 1)


def steps() -> Iterator[Step]:
    """Energies, forces, training gradients and relaxations of a small periodic crystal."""
    for method in ("naive", "cell_list"):
        yield Step(f"neighbors {method}", lambda m=method: _neighbors(m, False))
        yield Step(f"neighbors {method} as list", lambda m=method: _neighbors(m, True))
        yield Step(f"neighbors batch_{method}", lambda m=method: _batched_neighbors(f"batch_{m}"))
    for name in ("coulomb", "dsf", "ewald", "pme"):
        for dtype in (torch.float32, torch.float64):
            yield Step(f"{name} {dtype}", lambda n=name, d=dtype: _electrostatics(n, d, False))
        if name != "dsf":  # Its energy has no formula.
            yield Step(f"{name} gradients", lambda n=name: _electrostatics(n, torch.float64, True))
    for dtype in (torch.float32, torch.float64):
        yield Step(f"segments {dtype}", lambda d=dtype: _segments(d))
        yield Step(f"FIRE2 {dtype}", lambda d=dtype: _fire(d))
        yield Step(f"L-BFGS {dtype}", lambda d=dtype: _lbfgs(d))
    yield Step("splines", _splines)
    yield Step("DFT-D3", _dispersion)
    yield Step("pooling compiled", _compiled, "compiled")
    yield Step("sum of integers", _wrong_dtype, "error")
