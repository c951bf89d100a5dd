"""Research on caches: fake quantization, simulation, the oracle, metrics, calibration, tasks."""
