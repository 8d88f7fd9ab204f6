"""llama.cpp's programs beside the rungs, played by scripts that print what the real ones print."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ladder_helpers import mock_llm

from cllm.bench.ladder.llama_tools import Tools, read_batched_bench, read_llama_bench, tool_rungs
from cllm.bench.ladder.load import Load
from cllm.bench.ladder.rig import make_rig
from cllm.errors import CLLMError

LOAD = Load(num_prompts=4, input_len=4, output_len=3, concurrency=2)
BENCH = [
    {"n_prompt": 4, "n_gen": 0, "avg_ts": 900.0},
    {"n_prompt": 0, "n_gen": 3, "avg_ts": 60.0},
]
BATCHED = {"pp": 4, "tg": 3, "pl": 2, "t_pp": 0.01, "t_tg": 0.05, "t": 0.06, "speed_tg": 120.0}


def script(folder: Path, name: str, body: str) -> str:
    """A program that keeps its command line beside it, then does as `body` says."""
    path = folder / name
    keep = f"import sys; open({str(path) + '.argv'!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
    path.write_text(f"#!{sys.executable}\n{keep}{body}\n")
    path.chmod(0o755)
    return str(path)


def argv_of(program: str) -> list[str]:
    return Path(program + ".argv").read_text().splitlines()


def test_all_programs(tmp_path: Path) -> None:
    bench = script(tmp_path, "llama-bench", f"print({json.dumps(BENCH)!r})")
    batched = script(tmp_path, "llama-batched-bench", f"print('main: n_kv'); print({json.dumps(BATCHED)!r})")
    serve = "import os\nat = sys.argv.index('--host')\n"
    serve += "os.execv(sys.executable, [sys.executable, '-m', 'cllm.serve', '-q', '--backend', 'mock', *sys.argv[at:]])"
    server = script(tmp_path, "llama-server", serve)
    with mock_llm(LOAD) as llm:
        rig = make_rig(llm, LOAD, seed=0)
        with tool_rungs(Tools(bench, batched, server), rig, "m.gguf", is_gpu=False) as rungs:
            outcomes = {rung.name: rung.run() for rung in rungs}
    assert outcomes["llama-bench"].tokens_per_s == pytest.approx(60)
    for name in ("llama-batched-bench", "llama-batched-bench -kvu"):
        assert outcomes[name].tokens_per_s == pytest.approx(100)
    for name in ("llama-server", "llama-server, streaming"):
        assert outcomes[name].num_good(LOAD) == 4
    assert argv_of(bench) == ["-m m.gguf -ngl 0 -p 4 -n 3 -r 1 -o json"]
    plain, unified = argv_of(batched)
    assert plain == "-m m.gguf -ngl 0 -npp 4 -ntg 3 -npl 2 -c 512 --output-format jsonl"
    assert unified == plain + " -kvu"
    assert argv_of(server)[0].startswith("-m m.gguf -ngl 0 -c 512 -np 2 --host 127.0.0.1 --port ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit('error: no such file')", r"llama-bench failed \(status 1\): error: no such file"),
        ("print('[]')", "llama-bench printed what was not expected: StopIteration"),
        ("print('hello')", "llama-bench printed what was not expected: JSONDecodeError"),
    ],
)
def test_programs_that_fail(body: str, message: str, tmp_path: Path) -> None:
    tools = Tools(llama_bench=script(tmp_path, "llama-bench", body))
    with mock_llm(LOAD) as llm:
        rig = make_rig(llm, LOAD, seed=0)
        with tool_rungs(tools, rig, "m.gguf", is_gpu=True) as (rung,):
            with pytest.raises(CLLMError, match=message):
                rung.run()
            Path(str(tools.llama_bench)).unlink()
            with pytest.raises(CLLMError, match="cannot start"):
                rung.run()


def test_readings() -> None:
    assert read_llama_bench(json.dumps(BENCH), LOAD).tokens_per_s == pytest.approx(60)
    outcome = read_batched_bench("noise\n" + json.dumps(BATCHED), LOAD)
    assert outcome.seconds == 0.06
    assert outcome.timings[0].ttft == 0.01
