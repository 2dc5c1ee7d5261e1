"""`SyncedBatchNorm`: batch normalisation over the samples of all ranks, on CPU and CUDA."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tutti.collectives import native, run
from tutti.errors import ConfigError
from tutti.replica.samples import SampleCounts
from tutti.transports import Transport, for_devices


def synced(model: nn.Module, transport: Transport, sample_counts: SampleCounts) -> nn.Module:
    """Replace every BatchNorm layer of `model` by one that normalises over all ranks. Collective."""
    devices = {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]}
    channel = for_devices(transport, devices).channel("batchnorm")
    converted: dict[nn.Module, nn.Module] = {}  # A layer that is registered twice stays one layer.

    def convert(module: nn.Module) -> nn.Module:
        if module not in converted:
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, SyncedBatchNorm):
                converted[module] = SyncedBatchNorm(module, channel, sample_counts)
            else:
                converted[module] = module
                for name, child in module._modules.items():
                    module._modules[name] = None if child is None else convert(child)
        return converted[module]

    return convert(model)


class SyncedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A BatchNorm layer whose statistics, forward and backward, are those of all ranks' samples."""

    def __init__(
        self, layer: nn.modules.batchnorm._BatchNorm, transport: Transport, sample_counts: SampleCounts
    ) -> None:
        super().__init__(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        # The same tensors, not copies: the optimiser may hold the parameters already.
        self.weight, self.bias = layer.weight, layer.bias
        self.running_mean, self.running_var = layer.running_mean, layer.running_var
        self.num_batches_tracked = layer.num_batches_tracked
        self._transport = transport
        self._sample_counts = sample_counts
        # The constructor has put it into training mode.
        self.train(layer.training)

    def use(self, transport: Transport) -> Callable[[], None]:
        """Normalise over the ranks of another transport. Collective. Returns a function that undoes it."""
        previous = self._transport
        self._transport = for_devices(transport, {self.weight.device.type if self.affine else "cpu"}).channel("norm")

        def undo() -> None:
            self._transport.close()
            self._transport = previous

        return undo

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ConfigError(f"batch norm needs 2 or more dimensions (samples, features, ...), got {input.dim()}.")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        # A batch of weight 0 only keeps this rank's collectives matched with the others'; its samples do not count.
        counts = self._sample_counts.num_batches == 0 or self._sample_counts.num_samples > 0
        settings = (self.eps, self._transport, counts)
        output, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, settings)
        if self.training and self.running_mean is not None:
            unbiased = variance * (count / (count - 1).clamp(min=1))  # As torch keeps it in `running_var`.
            self._track(mean, unbiased)
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        # Without a momentum the running statistics are plain means over all batches, as in torch.
        rate = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(variance.to(self.running_var.dtype), rate)


class _Normalise(torch.autograd.Function):
    """(x - mean) / std with mean and std over all ranks. Forward takes three sums over all ranks, backward one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: tuple[float, Transport, bool]
    ) -> Any:
        eps, transport, counts = settings
        # Sums over many samples lose too much in half precision.
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        # x has shape (samples, features, ...); statistics have shape (features,).
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        values = x.to(wide)
        # Samples times points, as every point of a feature map counts.
        local_count = values.numel() // values.shape[1] if counts else 0
        count = _summed(torch.tensor([local_count], dtype=wide, device=x.device), transport)
        # Ranks that do not count add zeros: they must still take part in each sum.
        mean = _summed(values.sum(dims) * counts, transport) / count
        centred = values - mean.view(shape)
        # From centred values, not from the sum of squares, which cancels badly in float32.
        variance = _summed(centred.square().sum(dims) * counts, transport) / count
        scale = torch.rsqrt(variance + eps)
        normal = centred * scale.view(shape)
        # Backward needs the normalised values only, not x.
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.transport, ctx.dims, ctx.shape = transport, dims, shape
        ctx.local_count, ctx.has_bias = local_count, bias is not None
        output = normal if weight is None else normal * weight.view(shape)
        output = output if bias is None else output + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        normal, weight, scale, count = ctx.saved_tensors
        wide = grad.to(normal.dtype)
        by_weight = (wide * normal).sum(ctx.dims)
        by_bias = wide.sum(ctx.dims)
        # Each rank's loss is a mean over its own samples, and the exchange will weight its gradient by their number. So
        # the sums are weighted too, and the local count is divided out again, because the exchange multiplies by it.
        sums = _summed(torch.stack([by_weight, by_bias]) * ctx.local_count, ctx.transport)
        means = sums / (count * max(1, ctx.local_count))
        factor = scale if weight is None else scale * weight
        # dx = γ/σ · (g − mean(g) − x̂ · mean(g · x̂)), with both means over the samples of all ranks.
        by_x = wide - means[1].view(ctx.shape) - normal * means[0].view(ctx.shape)
        by_x = (by_x * factor.view(ctx.shape)).to(grad.dtype)
        return by_x, None if weight is None else by_weight, by_bias if ctx.has_bias else None, None


def _summed(tensor: Tensor, transport: Transport) -> Tensor:
    """Return the sum over all ranks, in place. Collective."""
    run(native.steps(tensor, transport))
    return tensor
