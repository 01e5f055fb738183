"""The metric of the miniature LongBench task: lm-eval's for code, from its LongBench tasks."""

from lm_eval.tasks.longbench.metrics import get_code_sim_score


def code_similarity(doc, results):
    return {"score": get_code_sim_score(doc, results)["code_sim_score"]}
