"""What the meters measure; how long anything takes is never asserted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cake.core.bench import CpuMeter, CudaMeter, meter
from cake.core.bench._floor import host_floor
from cake.core.bench._meter import device_activities


def event(name, start, us, device="CUDA", **more):
    time_range = SimpleNamespace(start=start, elapsed_us=lambda: us)
    return SimpleNamespace(name=name, device_type=SimpleNamespace(name=device), time_range=time_range, **more)


def test_device_activities_leave_out_the_host_and_marked_ranges():
    events = [
        event("out", 30.0, 2000.0, activity_type="kernel"),
        event("cudaLaunchKernel", 1.0, 5.0, device="CPU"),
        event("Memset (Device)", 20.0, 500.0, activity_type="gpu_memset", is_user_annotation=False),
        event("step", 5.0, 9000.0, is_user_annotation=True),
        event("step", 5.0, 9000.0, activity_type="gpu_user_annotation"),
        event("prep", 10.0, 1000.0),
    ]
    assert device_activities(events) == [("prep", 1.0), ("Memset (Device)", 0.5), ("out", 2.0)]


def test_cpu_meter_measures_the_run_alone():
    log = []
    cpu = meter(torch.device("cpu"))
    assert isinstance(cpu, CpuMeter)
    wall, host = cpu.sample(lambda: log.append("prepare") or 7, lambda state: log.append(state))
    assert log == ["prepare", 7]
    assert wall > 0.0
    assert host is None
    assert cpu.kernels(lambda: None, lambda state: None) is None
    assert cpu.peak_bytes(lambda: None, lambda state: None) is None
    cpu.synchronize()


def test_host_floor_runs_an_empty_node_every_way():
    class Counting(CpuMeter):
        ran = 0

        def sample(self, prepare, run):
            assert run(prepare()) is not None
            self.ran += 1
            return 1.0, float(self.ran)

    meter = Counting()
    # Three of five are untimed: of the forward 4 and 5 count, then 9 and 10, then 14 and 15.
    found = host_floor(meter, torch.device("cpu"), samples=2)
    assert found == {"fwd_train": 4.5, "bwd": 9.5, "fwd+bwd": 14.5}
    assert host_floor(CpuMeter(), torch.device("cpu"), samples=1) == {}


@pytest.mark.gpu
class TestCuda:
    @pytest.fixture
    def gpu(self):
        return CudaMeter(torch.device("cuda", torch.cuda.current_device()))

    def test_sample_gives_wall_and_host_time(self, gpu):
        x = torch.randn(1024, 1024, device="cuda")
        gpu.sample(lambda: None, lambda _: x @ x)  # the library's own set-up
        wall, host = gpu.sample(lambda: None, lambda _: x @ x)
        assert wall > 0.0
        assert host > 0.0
        asleep, _ = gpu.sample(lambda: None, lambda _: torch.cuda._sleep(100_000_000))
        assert asleep > wall

    def test_kernels_are_the_runs_own(self, gpu):
        x = torch.randn(2048, 2048, device="cuda")
        y = torch.empty_like(x)

        def run(_):
            y.copy_(x)
            with torch.profiler.record_function("a range"):
                torch.mul(x, 2.0, out=y)
                torch.mul(x, 2.0, out=y)

        gpu.kernels(lambda: None, run)
        for _ in range(3):
            found = gpu.kernels(lambda: x.add_(1.0), run)
            assert len(found) == 3, found
            assert all(0.0 < ms < 100.0 for _, ms in found)
            assert found[1][0] == found[2][0]
            assert "fill" not in " ".join(name for name, _ in found).lower()

    def test_kernels_of_other_streams_and_of_a_backward_thread_count(self, gpu):
        x = torch.randn(512, 512, device="cuda", requires_grad=True)
        side = torch.cuda.Stream()

        def run(_):
            with torch.cuda.stream(side):
                return torch.autograd.grad((x @ x).sum(), x)

        found = gpu.kernels(lambda: None, run)
        assert len(found) >= 4, found

    def test_peak_counts_what_prepare_left_and_what_was_freed(self, gpu):
        mib = 1024 * 1024

        def prepare():
            return torch.empty(2 * mib, dtype=torch.uint8, device="cuda")

        def run(kept):
            torch.empty(8 * mib, dtype=torch.uint8, device="cuda")
            return kept, torch.empty(mib, dtype=torch.uint8, device="cuda")

        assert gpu.peak_bytes(prepare, run) == 10 * mib
