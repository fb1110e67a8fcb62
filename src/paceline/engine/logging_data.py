"""The dictionary of facts about a wrapper that torch calls its logging data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline import environment

if TYPE_CHECKING:
    from paceline.engine.bucket import Bucket
    from paceline.engine.ddp import DistributedDataParallel

_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


def logging_data(wrapper: DistributedDataParallel) -> dict[str, Any]:
    """Facts about ``wrapper`` under the names of ``torch._C._distributed_c10d.DDPLoggingData``.

    Numbers are ints (times in nanoseconds, sizes in bytes, truth as 0 or 1), all else is text.
    """
    reducer = wrapper.reducer
    statistics = reducer.statistics
    data = {
        **_configuration(wrapper),
        **_parameters(wrapper),
        **_backend(wrapper),
        "iteration": statistics.steps,
        **statistics.kept,
        "join_uneven_inputs": int(statistics.uneven_inputs),
        "num_buckets_reduced": statistics.buckets_reduced,
        "has_error": int(bool(statistics.error)),
        "error": statistics.error,
    }
    if reducer.arrival_order is not None:
        data |= {
            "has_rebuilt_buckets": 1,
            "rebuilt_bucket_sizes": _sizes(reducer.layout.buckets),
            "rebuilt_per_bucket_param_indices": _indices(reducer.layout.buckets),
            "prev_iteration_grad_ready_order_indices": ", ".join(map(str, reducer.arrival_order)),
        }
    if reducer.hook is not None:
        data["comm_hook"] = reducer.hook.name
    return data


def _configuration(wrapper: DistributedDataParallel) -> dict[str, Any]:
    return {
        "world_size": dist.get_world_size(wrapper.process_group),
        "rank": dist.get_rank(wrapper.process_group),
        "module_name": type(wrapper.module).__name__,
        "device_ids": ", ".join(map(str, wrapper.device_ids or ())),
        "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
        "broadcast_buffers": int(wrapper.forward_sync_buffers),
        "find_unused_parameters": int(wrapper.find_unused_parameters),
        "gradient_as_bucket_view": int(wrapper.gradient_as_bucket_view),
        "static_graph": int(wrapper.static_graph),
        "bucket_cap_bytes": wrapper.bucket_bytes_cap,
    }


def _parameters(wrapper: DistributedDataParallel) -> dict[str, Any]:
    parameters = [slot.parameter for slot in wrapper.reducer.layout.slots]
    users = wrapper.reducer.users_of_parameters()
    unused = [parameter for parameter, count in zip(parameters, users, strict=True) if count == 0]
    return {
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "unused_parameter_size": sum(p.numel() * p.element_size() for p in unused),
        "dtypes": ", ".join(sorted({_DTYPE_NAMES.get(p.dtype, str(p.dtype)) for p in parameters})),
        "bucket_sizes": _sizes(wrapper.reducer.layout.buckets),
    }


def _backend(wrapper: DistributedDataParallel) -> dict[str, Any]:
    variables = environment.snapshot()
    name = dist.get_backend(wrapper.process_group)
    shown: dict[str, Any] = {
        "backend_name": name,
        "master_port": variables.get("MASTER_PORT", "N/A"),
        "master_addr": variables.get("MASTER_ADDR", "N/A"),
        "torch_distributed_debug": variables.get("TORCH_DISTRIBUTED_DEBUG", "N/A"),
        "cuda_visible_devices": variables.get("CUDA_VISIBLE_DEVICES", "N/A"),
    }
    if name == "gloo":
        shown |= {
            "gloo_socket_ifname": variables.get("GLOO_SOCKET_IFNAME", "N/A"),
            "gloo_device_transport": variables.get("GLOO_DEVICE_TRANSPORT", "N/A"),
            "gloo_num_threads": 2,  # fixed in torch's Gloo process group
        }
    return shown


def _sizes(buckets: list[Bucket]) -> str:
    sizes = (sum(slot.parameter.numel() * slot.parameter.element_size() for slot in b.slots) for b in buckets)
    return ", ".join(map(str, sizes))


def _indices(buckets: list[Bucket]) -> str:
    return ", ".join(" ".join(str(slot.index) for slot in bucket.slots) for bucket in buckets)
