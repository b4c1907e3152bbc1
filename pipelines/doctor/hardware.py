"""Checks of the processor, the memory, CUDA, and the interfaces of Linux for reading files."""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.doctor.finding import Finding, judged
from pipelines.environment import environment
from pipelines.planning.machine import available_memory, cuda_devices, has_gpu_node
from pipelines.progress.wording import counted, human_bytes
from storage_formats.cpus import has_bfloat16, usable_cpus

_MEMORY_BYTES = 2 * 10**9  # one worker with a small model, and a search
_OPEN_FILES = 2048  # eight times the files that a store keeps open


def hardware_findings() -> Iterator[Finding]:
    """Yield findings on the processor, the memory, CUDA and the kernel interfaces of this machine."""
    from storage_formats.reading.checked_copying import has_crc_instruction

    cpus = usable_cpus()
    yield Finding(
        "processor", f"{environment()['processor']}, {counted(cpus, 'usable CPU')}", values={"usable_cpus": cpus}
    )
    has_crc = has_crc_instruction()
    yield judged(
        "checksums",
        "the processor computes CRC-32C" if has_crc else "no CRC-32C instruction that compiled code can use",
        "" if has_crc else "checked fetches are slower; 'TokenStore.open(..., verify_reads=False)' skips the check",
        values={"crc32c_instruction": has_crc},
    )
    yield _bfloat16()
    yield _cuda()
    free = available_memory()
    yield judged(
        "memory",
        f"{human_bytes(free)} free",
        "" if free >= _MEMORY_BYTES else "a build or a search may run out of memory; end other programs",
        values={"free_bytes": free},
    )
    yield _read_interfaces()
    yield _open_files()


def _bfloat16() -> Finding:
    native = has_bfloat16()
    result = "the processor has no instructions for it, so float32 is faster"
    if native:
        result = "the processor has instructions for it, so the data type bfloat16 is faster than float32"
    return Finding("bfloat16", result, values={"native": native})


def _cuda() -> Finding:
    devices, has_node = cuda_devices(), has_gpu_node()
    return judged(
        "CUDA",
        f"torch can use {counted(devices, 'device')}" if devices else "no device that torch can use",
        "" if devices or not has_node else "a GPU is present: install its driver and a build of torch for CUDA",
        values={"devices": devices, "gpu_present": has_node},
    )


def _read_interfaces() -> Finding:
    from storage_formats.reading.engine_selection import engines

    names = engines()
    fast = "io_uring" in names or "direct" in names
    result = "io_uring works" if "io_uring" in names else "io_uring does not work"
    result += ", Linux AIO works" if "direct" in names else ", Linux AIO does not work"
    advice = "reads go through the page cache, which is slower for cold data. In a container, allow the system calls "
    advice += "io_uring_setup and io_uring_enter"
    return judged("asynchronous reads", result, "" if fast else advice, values={"engines": list(names)})


def _open_files() -> Finding:
    try:
        import resource
    except ImportError:  # not on Windows
        return Finding("open files", "this system has no limit that Python can read")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = limit == resource.RLIM_INFINITY
    advice = f"raise the limit with 'ulimit -n {_OPEN_FILES}': below it, shard files are closed and opened again"
    return judged(
        "open files",
        "no limit" if unlimited else f"at most {limit:,}",
        "" if unlimited or limit >= _OPEN_FILES else advice,
        values={"limit": None if unlimited else limit},
    )
