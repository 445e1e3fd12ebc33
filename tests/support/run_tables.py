"""Small tables of published runs."""

from pathlib import Path

from benchmarks.published_runs.cases import Case
from benchmarks.published_runs.forms import read_cases

MEGATRON = "params_b,heads,hidden,layers,tp,pp,gpus,batch,micro_batch,vlayers,tflops_per_gpu"
MEGATRON_ROW = "0.01,4,256,8,2,2,8,16,1,,30"
VTRAIN = "system,gpus,global_batch,micro_batch,hidden,heads,layers,seq,tensor,data,pipeline,iteration_ms"
VTRAIN_ROW = "single-node,8,16,2,256,4,4,128,2,2,2,50"
B200 = "model,layers,tensor,pipeline,data,context,expert,seq,microbatches,step_ms,peak_allocated_gib,peak_reserved_gib"
ALPA = "params_b,gpus,megatron,intra_only,inter_only,alpa"
TORCHTITAN = "model,gpus,fsdp,tp,pp,cp,seq,local_batch,recompute,variant,tokens_per_s_gpu,mem_gib"

KEYS = {
    *("mean_abs_error", "median_abs_error", "p95_abs_error", "signed_mean_error", "kendall_tau", "regret_mean"),
    *("without_prediction", "rows"),
}


def written(path: Path, *lines: str) -> Path:
    path.write_text("# of a test\n" + "\n".join(lines) + "\n")
    return path


def cases_of(path: Path, *lines: str) -> list[Case]:
    found = read_cases(written(path, *lines))
    assert found is not None
    assert not found.unread
    return list(found.cases)
