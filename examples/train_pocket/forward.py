"""Batched forward pass over the weights of transformers' models, without a loop over media.

The models' own forward passes call attention once per image or clip, and find the placeholders by
comparing ids. In training all rows of a step share one layout, which makes both unnecessary. Tests
compare these functions with the unpatched models.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_pocket.configs import TILE, Pocket

CHUNK = 100  # mel frames that the audio tower convolves at a time: one second


def rope_tables(decoder: nn.Module, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1, tokens, head_dim) for positions (3, tokens) or (tokens,)."""
    one_row = positions[:, None] if positions.ndim == 2 else positions[None]
    return decoder.rotary_emb(torch.empty(0, dtype=dtype, device=positions.device), one_row)


def text_layer(layer: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Run a decoder layer, causal, without cache: hidden (B, T, C) and its balancing loss."""
    attended = layer.self_attn(
        hidden_states=layer.input_layernorm(hidden),
        position_embeddings=(cos, sin),
        attention_mask=None,
    )[0]
    hidden = hidden + attended
    normed = layer.post_attention_layernorm(hidden)
    if hasattr(layer.mlp, "experts"):
        out, balance = all_experts(layer.mlp, normed)
        return hidden + out, balance
    return hidden + layer.mlp(normed), hidden.new_zeros(())


def all_experts(block: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Run every expert on every token, weighted by the router, and return the balancing loss too.

    This needs no host sync and, with two of four experts chosen, only twice the work.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    logits, scores, chosen = block.gate(flat)
    experts = block.experts
    weights = torch.zeros_like(logits).scatter(-1, chosen, scores.to(logits.dtype))
    both = torch.einsum("tc,eic->eti", flat, experts.gate_up_proj)
    gate, up = both.chunk(2, dim=-1)
    inner = experts.act_fn(gate) * up * weights.T[..., None]
    out = torch.einsum("eti,eci->tc", inner, experts.down_proj)
    share = (weights > 0).float().mean(0)
    balance = experts.num_experts * (share * logits.float().softmax(-1).mean(0)).sum()
    return out.view_as(hidden), balance.to(hidden.dtype)


def vision_block(block: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Run a block of Qwen's vision tower over images (N, S, C), each attending to itself."""
    images, patches, width = hidden.shape
    attention = block.attn
    qkv = attention.qkv(block.norm1(hidden)).view(images, patches, 3, attention.num_heads, -1)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(_rotate(query, cos, sin), _rotate(key, cos, sin), value)
    hidden = hidden + attention.proj(out.transpose(1, 2).reshape(images, patches, width))
    return hidden + block.mlp(block.norm2(hidden))


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = states.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(states.dtype)


class Towers:
    """Turns media into features, for one model.

    Args:
        pocket: model and processor; the weights are used in place.
    """

    def __init__(self, pocket: Pocket) -> None:
        lm = pocket.generator
        self.lm, self.decoder = lm, lm.get_decoder()
        inner = getattr(lm, "model", lm)
        self.visual = getattr(inner, "visual", None) or getattr(lm, "visual", None)
        self.audio = getattr(inner, "audio_tower", None) or getattr(lm, "audio_tower", None)
        self.llava = inner if hasattr(inner, "multi_modal_projector") else None
        self.vision_block, self.text_layer = vision_block, text_layer
        self._grids: dict[Any, Any] = {}

    def compile(self) -> None:
        """Compile the vision block and the text layer once, for all shapes."""
        self.vision_block = torch.compile(vision_block, dynamic=True)
        self.text_layer = torch.compile(text_layer, dynamic=True)

    def images(self, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Features (N, tokens, C) and DeepStack features of images (N, 3, H, W) uint8."""
        if self.llava is not None:
            return self._llava(pixels), []
        return self._qwen(pixels)

    def image_tokens(self, height: int, width: int) -> int:
        """Tokens of an image of ``height`` x ``width`` pixels."""
        if self.llava is None:
            return height * width // 32**2
        side = TILE // 24
        rows, columns = height // TILE * side, width // TILE * side
        return side**2 + rows * (columns + 1)

    def _llava(self, pixels: Tensor) -> Tensor:
        down, across = (side // TILE for side in pixels.shape[-2:])
        return self.llava_tiles(tiles(pixels), down, across)

    def llava_tiles(self, stack: Tensor, down: int, across: int) -> Tensor:
        """Features (N, tokens, C) of the processor's whole images and tiles.

        Args:
            stack: (N, 1 + down * across, 3, TILE, TILE), the whole image first.
            down: rows of tiles.
            across: columns of tiles.
        """
        images, dtype = len(stack), self.llava.image_newline.dtype
        seen = self.llava.vision_tower(stack.flatten(0, 1).to(dtype), output_hidden_states=True)
        features = self.llava.multi_modal_projector(seen.hidden_states[-1][:, 1:])
        side, channels = TILE // 24, features.shape[-1]
        features = features.view(images, 1 + down * across, side**2, channels)
        base, rest = features[:, 0], features[:, 1:].view(images, down, across, side, side, -1)
        rows = rest.permute(0, 1, 3, 2, 4, 5).reshape(images, down * side, across * side, channels)
        ends = self.llava.image_newline.expand(images, down * side, 1, channels)
        return torch.cat((base, torch.cat((rows, ends), dim=2).flatten(1, 2)), dim=1)

    def _qwen(self, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
        tower = self.visual
        weight = tower.patch_embed.proj.weight
        images, _, height, width = pixels.shape
        down, across = height // 32, width // 32
        patches = (pixels.to(weight.dtype) / 127.5 - 1).view(images, 3, down, 2, 16, across, 2, 16)
        patches = patches.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(images, down * across * 4, -1)
        # A still image is one frame twice.
        hidden = F.linear(patches, weight.sum(2).flatten(1), tower.patch_embed.proj.bias)
        cos, sin = self._vision_rope(down * 2, across * 2)
        hidden = hidden + self._vision_positions(down * 2, across * 2).to(hidden.dtype)
        features, stages = [], tower.deepstack_visual_indexes
        for place, block in enumerate(tower.blocks):
            hidden = self.vision_block(block, hidden, cos, sin)
            if place in stages:
                merger = tower.deepstack_merger_list[list(stages).index(place)]
                features.append(merger(hidden).view(images, down * across, -1))
        return tower.merger(hidden).view(images, down * across, -1), features

    def _vision_positions(self, height: int, width: int) -> Tensor:
        """Learned positions (S, C) of a grid of patches, the four of a token side by side."""
        table = self.visual.pos_embed.weight
        side = int(len(table) ** 0.5)
        grid = table.T.reshape(1, -1, side, side).float()
        grid = F.interpolate(grid, (height, width), mode="bilinear", align_corners=True)
        return _merge_order(grid[0].permute(1, 2, 0))

    def _vision_rope(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        key = (height, width)
        if key not in self._grids:
            attention, device = self.visual.blocks[0].attn, self.visual.pos_embed.weight.device
            half = attention.qkv.in_features // attention.num_heads // 2
            steps = torch.arange(0, half, 2, device=device, dtype=torch.float)
            frequencies = 10000.0 ** (-steps / half)
            rows, columns = torch.meshgrid(
                torch.arange(height, device=device),
                torch.arange(width, device=device),
                indexing="ij",
            )
            places = _merge_order(torch.stack((rows, columns), dim=-1)).float()
            angles = (places[..., None] * frequencies).flatten(1).repeat(1, 2)
            self._grids[key] = angles.cos(), angles.sin()
        return self._grids[key]

    def clips(self, mel: Tensor) -> Tensor:
        """Features (N, tokens, C) of log-mel (N, 128, frames), at most 8 s."""
        tower = self.audio
        clips, bins, frames = mel.shape
        seconds = -(-frames // CHUNK)
        padded = F.pad(mel.to(tower.conv2d1.weight.dtype), (0, seconds * CHUNK - frames))
        hidden = (
            padded.view(clips, bins, seconds, CHUNK).transpose(1, 2).reshape(-1, 1, bins, CHUNK)
        )
        for conv in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            hidden = F.gelu(conv(hidden))
        hidden = tower.conv_out(hidden.permute(0, 3, 1, 2).flatten(2))
        table = tower.positional_embedding.positional_embedding[: hidden.shape[1]]
        hidden = (hidden + table.to(hidden.dtype)).reshape(clips, -1, hidden.shape[-1])
        hidden = hidden[:, : clip_tokens(frames)]
        for layer in tower.layers:
            hidden = self._audio_layer(layer, hidden)
        return tower.proj2(tower.act(tower.proj1(tower.ln_post(hidden))))

    @staticmethod
    def _audio_layer(layer: nn.Module, hidden: Tensor) -> Tensor:
        attention, normed = layer.self_attn, layer.self_attn_layer_norm(hidden)
        heads = [
            project(normed).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        out = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        hidden = hidden + attention.out_proj(out)
        inner = layer.activation_fn(layer.fc1(layer.final_layer_norm(hidden)))
        return hidden + layer.fc2(inner)

    def text(
        self, ids: Tensor, positions: Tensor, media: list[tuple[Tensor, Tensor, list[Tensor]]]
    ) -> tuple[Tensor, Tensor]:
        """Hidden states (B, T, C) after the last norm, and the experts' balancing loss.

        Args:
            ids: (B, T) tokens, right-padded: attention is causal, so padding changes nothing.
            positions: (3, T) or (T,) position ids of all rows.
            media: by modality, places (count,) in the row, features (B, count, C), and DeepStack
                features of the same shape.
        """
        hidden = self.decoder.embed_tokens(ids)
        for places, features, _ in media:
            hidden = hidden.index_copy(1, places, features.to(hidden.dtype))
        cos, sin = rope_tables(self.decoder, positions, hidden.dtype)
        balance = hidden.new_zeros(())
        for number, layer in enumerate(self.decoder.layers):
            hidden, extra = self.text_layer(layer, hidden, cos, sin)
            balance = balance + extra
            for places, _, deep in media:
                if number < len(deep):
                    hidden = hidden.index_add(1, places, deep[number].to(hidden.dtype))
        return self.decoder.norm(hidden), balance / len(self.decoder.layers)


def tiles(pixels: Tensor) -> Tensor:
    """LLaVA's view of images (N, 3, H, W) uint8: the whole image made small, then its tiles."""
    images, _, height, width = pixels.shape
    small = F.interpolate(pixels.float(), (TILE, TILE), mode="bicubic", antialias=True)
    down, across = height // TILE, width // TILE
    parts = pixels.float().view(images, 3, down, TILE, across, TILE).permute(0, 2, 4, 1, 3, 5)
    stack = torch.cat((small.round().clamp(0, 255)[:, None], parts.flatten(1, 2)), dim=1)
    return stack / 127.5 - 1


def _merge_order(grid: Tensor) -> Tensor:
    """(H, W, C) to (H * W, C), with the four patches of a token one after another."""
    height, width, channels = grid.shape
    blocks = grid.view(height // 2, 2, width // 2, 2, channels)
    return blocks.permute(0, 2, 1, 3, 4).reshape(-1, channels)


def clip_tokens(frames: int) -> int:
    """Tokens of a clip of ``frames`` mel frames: 13 a second."""
    rest = frames % CHUNK
    for _ in range(3):
        rest = (rest + 1) // 2
    return rest + frames // CHUNK * 13
