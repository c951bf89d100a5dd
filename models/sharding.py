"""Where each parameter lives on a ('data', 'model') mesh: heads, MLP width and vocabulary over 'model'."""

import math
import re
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kitty_jax.models.decoder import DecoderConfig
from kitty_jax.models.params import Path, abstract_params, path_text

# Path -> partition, first match wins. The first matrix of attention and MLP is split by its output, the second by its
# input, so that one all-reduce closes each. Norms are whole everywhere.
PARTITION_TABLE = (
    (r"(embed|head)/weight", PartitionSpec("model", None)),
    (r"layers/\d+/attn/qkv/weight", PartitionSpec("model", None, None, None)),  # by KV head
    (r"layers/\d+/attn/qkv/bias", PartitionSpec("model", None, None)),
    (r"layers/\d+/attn/o/weight", PartitionSpec(None, "model")),
    (r"layers/\d+/mlp/gate_up/weight", PartitionSpec(None, "model", None)),
    (r"layers/\d+/mlp/down/weight", PartitionSpec(None, "model")),
    (r"(layers/\d+/(input_norm|post_norm|attn/[qk]_norm)|norm)/weight", PartitionSpec()),
)


def partition_spec(path: Path) -> PartitionSpec:
    """The partition of the parameter at a path; KeyError for a path that no decoder has."""
    for pattern, spec in PARTITION_TABLE:
        if re.fullmatch(pattern, path_text(path)):
            return spec
    raise KeyError(f"no partition is stated for parameter {path_text(path)}")


def param_sharding(mesh: Mesh, path: Path, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of one parameter. Raises ValueError where its shape does not divide over the mesh."""
    spec = partition_spec(path)
    for size, axis in zip(shape, spec, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            raise ValueError(
                f"parameter {path_text(path)} of shape {shape} cannot be split {mesh.shape[axis]} ways along its"
                f" dimension of {size}; use a '{axis}' axis whose size divides {size}"
            )
    return NamedSharding(mesh, spec)


def param_shardings(mesh: Mesh, config: DecoderConfig) -> dict[Path, NamedSharding]:
    """The sharding of every parameter of a model; ValueError where the mesh does not fit."""
    check_mesh(mesh, config)
    return {path: param_sharding(mesh, path, leaf.shape) for path, leaf in abstract_params(config).items()}


def make_mesh(data: int, model: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A ('data', 'model') mesh over data * model devices (default: jax.devices()), as check_mesh wants it.

    Raises ValueError where there are fewer devices.
    """
    there = len(jax.devices() if devices is None else devices)
    if data < 1 or model < 1 or data * model > there:
        raise ValueError(
            f"a mesh of data={data} x model={model} needs {data * model} devices, there are {there}; a CPU counts as "
            "several with XLA_FLAGS=--xla_force_host_platform_device_count=N, set before Python starts"
        )
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def check_mesh(mesh: Mesh, config: DecoderConfig) -> None:
    """Raise ValueError unless the mesh has Auto axes 'data' and 'model', and 'model' divides what it splits."""
    if set(mesh.axis_names) != {"data", "model"}:
        raise ValueError(f"the mesh must have the axes 'data' and 'model', got {mesh.axis_names}")
    if set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(
            f"the model leaves placement to the compiler and needs a mesh of Auto axes, got {mesh.axis_types}; build it"
            " with kitty_jax.models.sharding.make_mesh(data, model)"
        )
    ways = mesh.shape["model"]
    sizes = {name: getattr(config, name) for name in ("num_kv_heads", "mlp_dim", "vocab_size")}
    wrong = {name: size for name, size in sizes.items() if size % ways}
    if wrong:
        common = math.gcd(*sizes.values())
        raise ValueError(
            f"a 'model' axis of {ways} does not divide {wrong}; use a size that divides {common} for this model"
        )
