"""Make prompts of mathematical word problems: rows as in GSM8K (`question`, `answer`) or with `problem`, `solution`.

Rows that have a `prompt` already stay as they are.
"""

_INSTRUCTION = "Solve this problem step by step and put the final answer in \\boxed{}."
_COLUMNS = (("question", "answer"), ("problem", "solution"))


def load_training_dataset(dataset_path, *, default_loader, **kwargs):
    """Rows with `prompt` and `solutions`."""
    dataset = default_loader(dataset_path)
    if len(dataset) == 0 or "prompt" in dataset[0]:
        return dataset
    for problem, solution in _COLUMNS:
        if problem in dataset[0] and solution in dataset[0]:
            return dataset.map(lambda row, p=problem, s=solution: _row(row[p], row[s]))
    raise KeyError(f"expected the columns prompt, question and answer, or problem and solution; got {list(dataset[0])}")


def _row(problem, solution):
    # GSM8K writes its reasoning first and the result after four hashes.
    result = str(solution).rsplit("####", 1)[-1].strip()
    return {"prompt": f"{_INSTRUCTION}\n\n{problem}\n\nSolution:", "solutions": [result]}
