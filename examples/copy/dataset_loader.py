"""Make prompts and solutions of the copy task's raw rows: `{"digits": "4821"}` -> `4821=` and `4821`."""


def load_training_dataset(dataset_path, *, default_loader, **kwargs):
    """Rows with `prompt` and `solutions`, as every run needs them."""
    return default_loader(dataset_path).map(_row)


def _row(raw):
    return {"prompt": f"{raw['digits']}=", "solutions": [raw["digits"]]}
