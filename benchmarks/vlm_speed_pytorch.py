"""PyTorch's side of vlm_speed.py, which starts it with an interpreter that has torch and transformers."""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def seconds(call):
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.inference_mode()
def measure(folder):
    """Measures what job.json says, and writes pytorch.json and pytorch.npz."""
    job, inputs = json.loads((folder / "job.json").read_text()), np.load(folder / "inputs.npz")
    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    rates = defaultdict(list)
    llama = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=dtype).eval()
    prompts = torch.tensor(inputs["prompts"], dtype=torch.int64)

    def generate(batch, count):
        chosen = prompts[:batch]
        return llama.generate(
            chosen,
            attention_mask=torch.ones_like(chosen),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
            eos_token_id=None,
        )

    first_token = seconds(lambda: generate(1, 1))
    count = job["new_tokens"]
    for batch in job["batches"]:
        generate(batch, 2)
        for _ in range(job["repeats"]):
            reading = seconds(lambda: generate(batch, 1))  # noqa: B023
            writing = seconds(lambda: generate(batch, count)) - reading  # noqa: B023
            rates[f"prompt tokens/s, batch {batch}"].append(batch * prompts.shape[1] / reading)
            rates[f"new tokens/s, batch {batch}"].append(batch * (count - 1) / writing)
    outputs = {"logits": llama(prompts[:1]).logits[:, -1]}

    clip = transformers.CLIPModel.from_pretrained(folder / "clip", dtype=dtype).eval()
    images = torch.tensor(inputs["images"]).permute(0, 3, 1, 2).contiguous().to(dtype)
    texts = torch.tensor(inputs["texts"], dtype=torch.int64)
    towers = {
        "image": (lambda x: clip.get_image_features(pixel_values=x).pooler_output, images),
        "text": (lambda x: clip.get_text_features(input_ids=x).pooler_output, texts),
    }
    for kind, (encode, x) in towers.items():
        for batch in job["batches"]:
            outputs[kind] = encode(x[:batch])
            times = [seconds(lambda: encode(x[:batch])) for _ in range(job["repeats"])]  # noqa: B023
            rates[f"CLIP {kind}s/s, batch {batch}"] += [batch / t for t in times]
    report = {"rates": rates, "first_token": first_token, "version": f"torch {torch.__version__}"}
    (folder / "pytorch.json").write_text(json.dumps(report))
    np.savez(folder / "pytorch.npz", **{name: x.float().numpy() for name, x in outputs.items()})


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
