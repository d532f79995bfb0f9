print("a training script", flush=True)
