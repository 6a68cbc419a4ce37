"""The numbers of a run for other tools: TensorBoard, W&B, trackio, Parquet, CSV; after a run, or while it goes."""
