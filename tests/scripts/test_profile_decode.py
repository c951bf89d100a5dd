"""The arithmetic of profile_decode.py; the profile itself needs a GPU."""

from scripts.profile_decode import busy_ns, kernel_rows


def test_busy_time_is_the_union() -> None:
    assert busy_ns([("a", 0, 10), ("b", 4, 6), ("c", 8, 12), ("d", 20, 25)]) == 17
    assert busy_ns([]) == 0


def test_kernels_of_one_name_are_one_row() -> None:
    events = [("fusion.1", 0, 4000), ("fusion_2", 5000, 9000), ("gemm", 9000, 29000), ("fusion", 30000, 31000)]
    assert kernel_rows(events, steps=2) == [
        {"kernel": "gemm", "calls": 0.5, "us": 10.0},
        {"kernel": "fusion", "calls": 1.5, "us": 4.5},
    ]
