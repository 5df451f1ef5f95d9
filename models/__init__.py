"""What a deployment does and costs: hardware, LLM, workload, stage times, queueing, KV cache, economics."""
