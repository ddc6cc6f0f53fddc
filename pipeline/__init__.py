"""Data sets: prompts in, a fixed plan of shards, one committed Parquet part per shard out."""
