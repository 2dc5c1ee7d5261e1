"""A loop of Accelerate with gossip.

    tutti run --workers 2 accelerate_digits.py

Needs Accelerate: pip install '.[transformers]'
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tutti.integrations.accelerate import TuttiAccelerator
from tutti.recipes import digits

accelerator = TuttiAccelerator("gossip", cpu=True)
splits = digits().data(None)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(splits.train, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(8):
    for x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
accelerator.finish()

tests = accelerator.prepare(DataLoader(splits.test, batch_size=64))
right = total = 0
with torch.no_grad():
    for x, y in tests:
        predicted, labels = accelerator.gather_for_metrics((model(x).argmax(1), y))
        right, total = right + int((predicted == labels).sum()), total + len(labels)
accelerator.print(f"accuracy {right / total:.3f}")
