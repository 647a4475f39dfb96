"""X-CLIP: CLIP for videos, with texts that attend to the video (Ni et al., 2022).

Since a text's embedding depends on the video that it is compared with, it cannot be computed once per task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxreward.errors import ModelError
from jaxreward.models.clip import (
    IGNORED,
    ImageEmbedding,
    TextConfig,
    TextEncoder,
    VisionConfig,
    image_embedding_tensors,
    projection_tensors,
    text_tensors,
    tower_fields,
)
from jaxreward.models.encoder_layers import (
    CLIP_NAMES,
    MLP,
    Attention,
    Encoder,
    EncoderConfig,
    EncoderLayer,
    attention_tensors,
    encoder_tensors,
    linear_tensors,
    mlp_tensors,
    norm_tensors,
    unit_length,
)
from jaxreward.models.hub_config import Fields
from jaxreward.models.layers import ACTIVATIONS, KERNEL_INIT, LayerNorm, Linear
from jaxreward.models.weights import Architecture, Stored
from jaxreward.types import Array, PyTree

INTEGRATION_DEFAULTS = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}


@dataclasses.dataclass(frozen=True)
class FrameEncoderConfig(EncoderConfig):
    """Structure of the encoder whose layers pass messages between the frames of a video.

    Attributes:
      frames: of a video.
    """

    frames: int = 8


@dataclasses.dataclass(frozen=True)
class PromptConfig:
    """Structure of the video-specific prompt generator.

    Attributes:
      layers: depth.
      heads: attention heads; divides the projection width.
      activation: of the MLP.
    """

    layers: int
    heads: int
    activation: str


@dataclasses.dataclass(frozen=True)
class XCLIPConfig:
    """Structure of X-CLIP.

    Attributes:
      text: its text encoder.
      vision: its frame encoder, whose `encoder` is a FrameEncoderConfig.
      integration: the transformer over the frames' embeddings (MIT); of width `projection`.
      prompts: the prompt generator.
      projection: P, the width of the common embedding.
    """

    text: TextConfig
    vision: VisionConfig
    integration: EncoderConfig
    prompts: PromptConfig
    projection: int

    @property
    def frames(self) -> int:
        """Number of frames of a video."""
        return self.vision.encoder.frames

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, dtype: str = "float32") -> XCLIPConfig:
        """Reads a Hugging Face config.json of model_type 'xclip'.

        Args:
          config: the JSON object.
          dtype: of the computation, 'float32' or 'bfloat16'.

        Raises:
          ModelError: for a field that is of the wrong type or does not fit the others.
        """
        fields = Fields(config)
        vision_fields = tower_fields(fields, "vision")
        projection = fields.integer("projection_dim", 512)
        integration = EncoderConfig.from_fields(vision_fields, dtype, "mit_", **INTEGRATION_DEFAULTS)
        if integration.width != projection:
            raise vision_fields.refuse("mit_hidden_size", f"projection_dim {projection}")
        heads = fields.integer("prompt_num_attention_heads", 8)
        if projection % heads:
            raise fields.refuse("prompt_num_attention_heads", f"a divisor of projection_dim {projection}")
        vision = VisionConfig.from_fields(vision_fields, dtype)
        frames = vision_fields.integer("num_frames", 8)
        return cls(
            # X-CLIP pools at the highest id, whatever its config says
            text=dataclasses.replace(
                TextConfig.from_fields(tower_fields(fields, "text"), dtype), end_token=None
            ),
            vision=dataclasses.replace(
                vision, encoder=FrameEncoderConfig(**dataclasses.asdict(vision.encoder), frames=frames)
            ),
            integration=integration,
            prompts=PromptConfig(
                layers=fields.integer("prompt_layers", 2),
                heads=heads,
                activation=fields.choice("prompt_hidden_act", ACTIVATIONS, "quick_gelu"),
            ),
            projection=projection,
        )


class MessageLayer(nn.Module):
    """An encoder layer in which every frame also attends to a message from all frames (section 3.2).

    Attributes:
      config: structure.
    """

    config: FrameEncoderConfig

    @nn.compact
    def __call__(self, hidden: Array, where: Array | None) -> tuple[Array, None]:
        """One layer of the scan.

        Args:
          hidden: `dtype` [V K, T, D], the K frames of each video one after another; token 0 is the class.
          where: None; all tokens are there.

        Returns:
          (hidden, None).
        """
        config = self.config
        message = Linear(config.width, dtype=config.dtype, name="message")(hidden[:, 0])
        message = message.reshape(-1, config.frames, config.width)
        normed = LayerNorm(config.norm_epsilon, name="message_norm")(message)
        message = message + Attention(config.heads, config.dtype, name="message_attention")(normed, normed)
        with_message = jnp.concatenate([hidden, message.reshape(-1, 1, config.width)], axis=1)
        with_message, _ = EncoderLayer(config, name="frame")(with_message, where)
        return with_message[:, :-1], None


class FrameEncoder(nn.Module):
    """The vision transformer over the frames of videos.

    Attributes:
      config: structure.
    """

    config: VisionConfig

    @nn.compact
    def __call__(self, frames: Array) -> tuple[Array, Array]:
        """Encodes frames.

        Args:
          frames: [V K, H, W, 3], normalised, the K frames of each video one after another.

        Returns:
          (`dtype` [V K, D], the normed hidden state of the class token; `dtype` [V K, patches, D], the hidden
          states of the patches).
        """
        epsilon = self.config.encoder.norm_epsilon
        hidden = ImageEmbedding(self.config, name="embedding")(frames)
        hidden = LayerNorm(epsilon, name="embedding_norm")(hidden)
        hidden = Encoder(self.config.encoder, MessageLayer, name="encoder")(hidden)
        return LayerNorm(epsilon, name="final_norm")(hidden[:, 0]), hidden[:, 1:]


class FrameIntegration(nn.Module):
    """Turns the embeddings of frames into one of the video (MIT, section 3.2).

    Attributes:
      config: structure.
      frames: K, of a video.
    """

    config: EncoderConfig
    frames: int

    @nn.compact
    def __call__(self, frames: Array) -> Array:
        """Maps `dtype` [V, K, P] to `dtype` [V, P]."""
        config = self.config
        positions = self.param("positions", KERNEL_INIT, (self.frames, config.width), config.dtype)
        hidden = Encoder(config, name="encoder")(frames + positions.astype(config.dtype))
        return jnp.mean(hidden + frames, axis=1)


class PromptLayer(nn.Module):
    """Cross-attention from texts to a video, and an MLP.

    Attributes:
      config: structure.
      epsilon: of the layer norms.
      dtype: of the computation.
    """

    config: PromptConfig
    epsilon: float
    dtype: str

    @nn.compact
    def __call__(self, texts: Array, video: Array) -> tuple[Array, None]:
        """One layer of the scan: [V, N, P] and [V, patches, P] to ([V, N, P], None)."""
        config = self.config
        normed = LayerNorm(self.epsilon, name="attention_norm")(texts)
        texts = texts + Attention(config.heads, self.dtype, use_bias=False, name="attention")(normed, video)
        normed = LayerNorm(self.epsilon, name="mlp_norm")(texts)
        mlp = MLP(4 * texts.shape[-1], config.activation, self.dtype, name="mlp")
        return texts + mlp(normed), None


class PromptGenerator(nn.Module):
    """What a video adds to the embeddings of texts (section 3.3).

    Attributes:
      config: structure.
      vision_epsilon: of the norm of the video's patches.
      text_epsilon: of the norms of the layers.
      dtype: of the computation.
    """

    config: PromptConfig
    vision_epsilon: float
    text_epsilon: float
    dtype: str

    @nn.compact
    def __call__(self, texts: Array, video: Array) -> Array:
        """Maps [V, N, P] texts and [V, patches, P] patches to `dtype` [V, N, P]."""
        video = LayerNorm(self.vision_epsilon, name="video_norm")(video)
        layers = nn.scan(
            PromptLayer,
            variable_axes={"params": 0, "lora": 0, "intermediates": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.config.layers,
        )
        texts, _ = layers(self.config, self.text_epsilon, self.dtype, name="layers")(texts, video)
        # 0.1 is where training starts, so that the video changes its texts little at first
        alpha = self.param("alpha", nn.initializers.constant(0.1), (texts.shape[-1],), self.dtype)
        return alpha.astype(self.dtype) * texts


class XCLIP(nn.Module):
    """Video and text encoder with a common embedding.

    Attributes:
      config: structure.
    """

    config: XCLIPConfig

    def setup(self) -> None:
        """Declares the encoders, their projections, the prompt generator and the temperature."""
        config = self.config
        dtype, epsilon = config.vision.encoder.dtype, config.vision.encoder.norm_epsilon
        self.vision = FrameEncoder(config.vision)
        self.text = TextEncoder(config.text)
        self.image_projection = Linear(config.projection, False, dtype)
        self.text_projection = Linear(config.projection, False, dtype)
        self.integration = FrameIntegration(config.integration, config.frames)
        self.patch_norm = LayerNorm(epsilon)
        self.patch_projection = Linear(config.projection, False, dtype)
        self.prompts = PromptGenerator(config.prompts, epsilon, config.text.encoder.norm_epsilon, dtype)
        self.logit_scale = self.param("logit_scale", nn.initializers.constant(2.6592), (), jnp.float32)

    def encode_video(self, videos: Array) -> tuple[Array, Array]:
        """Embeds videos.

        Args:
          videos: float32 [V, K, H, W, 3] with exactly the K frames of the model, resized and normalised as
            preprocessor_config.json says.

        Returns:
          (`dtype` [V, P], the embedding, not of unit length; `dtype` [V, patches, P], what texts attend to).

        Raises:
          ModelError: if the videos have another number of frames or another size than the model's.
        """
        frames = self.config.frames
        if videos.ndim != 5 or videos.shape[1] != frames:
            raise ModelError(
                f"videos of shape {videos.shape} found; X-CLIP reads [V, {frames}, H, W, 3]: sample "
                f"{frames} frames of each"
            )
        classes, patches = self.vision(videos.reshape(-1, *videos.shape[2:]))
        classes = self.image_projection(classes)
        video = self.integration(classes.reshape(-1, frames, classes.shape[-1]))
        patches = self.patch_projection(self.patch_norm(patches))
        return video, jnp.mean(patches.reshape(-1, frames, *patches.shape[1:]), axis=1)

    def encode_text(self, tokens: Array, where: Array | None = None) -> Array:
        """Embeds texts, not yet prompted by a video.

        Args:
          tokens: int32 [N, T]; the end token of every row has its highest id.
          where: bool [N, T], False for padding; None: no padding.

        Returns:
          `dtype` [N, P].

        Raises:
          ModelError: if T exceeds the number of positions.
        """
        return self.text_projection(self.text(tokens, where))

    def prompt(self, texts: Array, patches: Array) -> Array:
        """Adds to texts what each video says about them: [N, P] and [V, patches, P] to `dtype` [V, N, P]."""
        texts = jnp.broadcast_to(texts, (patches.shape[0], *texts.shape))
        return texts + self.prompts(texts, patches)

    def logits(self, videos: Array, texts: Array) -> Array:
        """exp(logit_scale) times the cosine of videos and their texts.

        Args:
          videos: [V, P].
          texts: [V, N, P], from `prompt`.

        Returns:
          float32 [V, N].
        """
        cosine = jnp.einsum("vp,vnp->vn", unit_length(videos), unit_length(texts))
        return jnp.exp(self.logit_scale.astype(jnp.float32)) * cosine

    def __call__(self, videos: Array, tokens: Array, where: Array | None = None) -> Array:
        """Logits of every video and text, float32 [V, N]; see `encode_video` and `encode_text`."""
        video, patches = self.encode_video(videos)
        return self.logits(video, self.prompt(self.encode_text(tokens, where), patches))


def _frame_layer_tensors(layers: int) -> dict[str, Stored]:
    """Where a checkpoint keeps the `MessageLayer`s."""
    into, model = "vision/encoder/layers/", "vision_model.encoder.layers.{}."
    attention = {
        part: f"{model}message_attn.{CLIP_NAMES[f'attention/{part}'].removeprefix('self_attn.')}"
        for part in ("query", "key", "value", "out")
    }
    return (
        linear_tensors(into + "message", model + "message_fc", "embed", None, layers)
        | norm_tensors(into + "message_norm", model + "message_ln", layers)
        | attention_tensors(into + "message_attention", attention, layers)
        | encoder_tensors(layers, model=model, into=into + "frame/")
    )


def _prompt_tensors(layers: int) -> dict[str, Stored]:
    """Where a checkpoint keeps the `PromptGenerator`."""
    into, model = "prompts/layers/", "prompts_generator.decoder.{}."
    attention = {
        "query": model + "cross_attn.q_proj",
        "key": model + "cross_attn.k_proj",
        "value": model + "cross_attn.v_proj",
        "out": model + "cross_attn.proj",
    }
    return (
        norm_tensors("prompts/video_norm", "prompts_generator.layernorm")
        | norm_tensors(into + "attention_norm", model + "norm1", layers)
        | attention_tensors(into + "attention", attention, layers, use_bias=False)
        | norm_tensors(into + "mlp_norm", model + "norm3", layers)
        | mlp_tensors(into + "mlp", model + "mlp.0", model + "mlp.3", layers)
        | {"prompts/alpha": Stored("prompts_generator.alpha", ("norm",))}
    )


def architecture(config: Mapping[str, Any], *, dtype: str) -> Architecture:
    """X-CLIP with the structure of a config.json, and where a checkpoint keeps its parameters.

    Args:
      config: the JSON object.
      dtype: of parameters and computation, 'float32' or 'bfloat16'.

    Raises:
      ModelError: for a config that cannot be used.
    """
    structure = XCLIPConfig.from_dict(config, dtype=dtype)
    module = XCLIP(structure)
    frames, resolution = structure.frames, structure.vision.resolution

    def initialise(key: Any) -> PyTree:
        videos = jnp.zeros((1, frames, resolution, resolution, 3))
        return module.init(key, videos, jnp.zeros((1, 1), jnp.int32))

    integration = structure.integration
    tensors = (
        text_tensors(structure.text)
        | image_embedding_tensors(structure.vision)
        | norm_tensors("vision/embedding_norm", "vision_model.pre_layernorm")
        | _frame_layer_tensors(structure.vision.encoder.layers)
        | norm_tensors("vision/final_norm", "vision_model.post_layernorm")
        | projection_tensors()
        | {
            "integration/positions": Stored(
                "mit.position_embedding", (None, "embed"), shape=(1, frames, integration.width)
            )
        }
        | encoder_tensors(
            integration.layers, model="mit.encoder.layers.{}.", into="integration/encoder/layers/"
        )
        | norm_tensors("patch_norm", "prompts_visual_layernorm")
        # a bare parameter in the checkpoint, stored [in, out] already
        | {"patch_projection/kernel": Stored("prompts_visual_projection", ("embed", None))}
        | _prompt_tensors(structure.prompts.layers)
    )
    return Architecture(module, tensors, initialise, ignored=IGNORED)
