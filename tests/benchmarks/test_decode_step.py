"""The benchmark of decode steps, in small on a CPU."""

from benchmarks import decode_step
from benchmarks.record import Record


def test_every_way_of_stepping_is_measured(tmp_path, capsys) -> None:
    arguments = ["--tiny", "--models", "qwen3-vl-30b-a3b", "--batches", "2"]
    assert decode_step.main([*arguments, "--out", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    rows = Record.load(path).rows
    assert [row["way"] for row in rows] == [
        "DynamicCache",
        "bf16, eager",
        "bf16, graph",
        "compact, eager",
        "compact, graph",
    ]
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in rows)
    held = {row["way"]: row["kv_bytes"] for row in rows}
    # 2 rows, 2 layers, keys and values of 300 tokens and 24 steps, 1 KV head of 128 in bfloat16.
    assert held["DynamicCache"] == 2 * 2 * 2 * 300 * 128 * 2
    assert held["compact, graph"] < held["bf16, graph"]
    assert "compact, graph" in capsys.readouterr().out


def test_weights_that_a_step_reads() -> None:
    """Of 8 experts, of which a token takes 2, four tokens are expected to read 68%."""
    model = decode_step.Model("qwen3-vl-30b-a3b", decode_step.torch.device("cpu"), tiny=True)
    parts = dict(model.model.named_parameters())
    experts = sum(weight.nbytes for name, weight in parts.items() if ".experts." in name)
    known = ("visual", "embed_tokens")
    dense = sum(x.nbytes for n, x in parts.items() if not any(part in n for part in known))
    dense -= experts
    assert model.weights(1) == dense + experts / 4
    assert abs(model.weights(4) - dense - experts * (1 - 0.75**4)) < 1
