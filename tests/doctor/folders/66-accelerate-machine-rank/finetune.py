import argparse
from accelerate import Accelerator
from datasets import load_from_disk
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, default_data_collator

p = argparse.ArgumentParser()
p.add_argument("--output-dir", required=True)
args = p.parse_args()

accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B")
loader = DataLoader(load_from_disk("tokens"), batch_size=4, shuffle=True, collate_fn=default_data_collator)
model, opt, loader = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-5), loader)
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    opt.step(); opt.zero_grad()
accelerator.save_state(args.output_dir)
