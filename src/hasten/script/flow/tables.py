"""What is known of PyTorch's names: which make tensors, which want one device, which wait."""

# Long lists of names read better as text.
# ruff: noqa: SIM905

from __future__ import annotations

# Factories take `device=` and otherwise make a tensor on the default device.
FACTORIES = frozenset(
    "zeros ones empty full rand randn randint arange range linspace logspace eye tensor randperm"
    " tril_indices triu_indices scalar_tensor hann_window hamming_window bartlett_window"
    " blackman_window kaiser_window empty_strided from_numpy frombuffer from_file".split()
)
LEGACY = frozenset(
    "Tensor FloatTensor DoubleTensor HalfTensor BFloat16Tensor LongTensor IntTensor ShortTensor"
    " ByteTensor CharTensor BoolTensor".split()
)
LIKE = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like".split()
)
NEW = frozenset("new_zeros new_ones new_empty new_full new_tensor new".split())
SCALAR_MAKERS = frozenset({"tensor", "scalar_tensor", "as_tensor", "asarray"})
ONE_DIMENSION = frozenset(
    "arange range linspace logspace randperm hann_window hamming_window bartlett_window"
    " blackman_window kaiser_window frombuffer".split()
)

# Functions of torch that take tensors of any devices, or none at all.
ANY_DEVICE = frozenset(
    "save load is_tensor numel manual_seed set_printoptions device compile jit typename"
    " as_tensor asarray no_grad enable_grad set_grad_enabled inference_mode autocast Generator"
    " Size get_default_dtype set_default_dtype set_default_device set_num_threads finfo iinfo"
    " promote_types result_type can_cast is_floating_point is_complex seed get_rng_state"
    " set_rng_state use_deterministic_algorithms set_float32_matmul_precision"
    " broadcast_shapes is_grad_enabled".split()
)
# In these a zero-dimensional CPU tensor may meet tensors of the device.
STRICT = frozenset(
    "matmul mm bmm mv addmm baddbmm dot einsum linear bilinear conv1d conv2d conv3d embedding"
    " cat concat concatenate stack hstack vstack dstack index_select gather scatter scatter_"
    " scatter_add scatter_add_ index_add index_add_ index_copy index_copy_ index_fill take"
    " cross_entropy nll_loss embedding_bag batch_norm layer_norm group_norm cdist outer tensordot"
    " scaled_dot_product_attention multi_head_attention_forward chain_matmul cosine_similarity"
    " grid_sample take_along_dim scatter_reduce index_reduce".split()
)
IN_PLACE_ANY = frozenset(
    (
        "index_put",
        "index_put_",
        "ctc_loss",
        "copy_",
        "set_",
        "to",
        "type_as",
        "cpu",
        "cuda",
        "tolist",
        "numpy",
    )
)
FUNCTIONAL = (
    "torch.", "torch.nn.functional.", "torch.linalg.", "torch.special.", "torch.fft.",
)  # fmt: skip
REDUCTIONS = frozenset(
    "sum mean prod max min norm std var all any argmax argmin logsumexp median amax amin"
    " nansum nanmean count_nonzero".split()
)
NO_GRAPH = frozenset(
    "argmax argmin eq ne lt le gt ge size bincount round sign floor ceil argsort isnan isinf"
    " isfinite logical_and logical_or logical_not one_hot multinomial bernoulli".split()
)
SAME_SHAPE = frozenset(
    "to float double half bfloat16 int long bool byte short type type_as contiguous clone detach"
    " detach_ cuda cpu requires_grad_ pin_memory abs neg exp log log1p sqrt rsqrt sin cos tanh"
    " sigmoid relu clamp clamp_ clip pow square add add_ mul mul_ sub sub_ div div_ zero_ fill_"
    " normal_ uniform_ softmax log_softmax triu tril flip roll cumsum masked_fill masked_fill_"
    " round floor ceil copy_ squeeze_ lerp_ addcmul_ addcdiv_ normalize dropout gelu bool_"
    " eq ne lt le gt ge logical_not sign random_ bernoulli_ exponential_ share_memory_".split()
)
# With a dimension these give values and indices.
PAIRS = frozenset("max min median mode cummax cummin sort topk kthvalue".split())
RESHAPES = frozenset(
    "view reshape flatten unsqueeze expand expand_as view_as repeat permute unfold unflatten"
    " tile repeat_interleave t transpose T mT".split()
)

# Modules of torch.nn: with parameters of their own, losses that may have weights, containers.
WITH_PARAMETERS = frozenset(
    "Linear Bilinear LazyLinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d"
    " ConvTranspose3d LazyConv1d LazyConv2d LazyConv3d BatchNorm1d BatchNorm2d BatchNorm3d"
    " SyncBatchNorm LazyBatchNorm1d LazyBatchNorm2d LayerNorm GroupNorm RMSNorm InstanceNorm1d"
    " InstanceNorm2d Embedding EmbeddingBag LSTM GRU RNN LSTMCell GRUCell RNNCell"
    " MultiheadAttention TransformerEncoderLayer TransformerDecoderLayer TransformerEncoder"
    " TransformerDecoder Transformer PReLU AdaptiveLogSoftmaxWithLoss".split()
)
SAME_NDIM = frozenset(
    "Linear Conv1d Conv2d Conv3d BatchNorm1d BatchNorm2d BatchNorm3d LayerNorm GroupNorm Dropout"
    " ReLU GELU Tanh Sigmoid SiLU ELU LeakyReLU Softmax LogSoftmax Identity".split()
)
LOSSES = frozenset(
    "CrossEntropyLoss NLLLoss BCELoss BCEWithLogitsLoss MSELoss L1Loss SmoothL1Loss HuberLoss"
    " KLDivLoss MultiLabelSoftMarginLoss MultiMarginLoss CosineEmbeddingLoss TripletMarginLoss"
    " MarginRankingLoss HingeEmbeddingLoss GaussianNLLLoss PoissonNLLLoss SoftMarginLoss"
    " MultiLabelMarginLoss CTCLoss".split()
)
WEIGHTED = ("weight", "pos_weight")
CONTAINERS = frozenset(("Sequential", "ModuleList", "ModuleDict"))
PARALLEL = frozenset(
    ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel",
     "torch.nn.parallel.DistributedDataParallel",
     "torch.nn.parallel.distributed.DistributedDataParallel")
)  # fmt: skip
TRAIN_MODE = frozenset(
    "Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout BatchNorm1d"
    " BatchNorm2d BatchNorm3d SyncBatchNorm LazyBatchNorm1d LazyBatchNorm2d InstanceNorm1d"
    " InstanceNorm2d".split()
)
# Optimizers that build state when they are made: it lies where the parameters lay then.
EAGER_OPTIMIZERS = frozenset(("torch.optim.Adagrad", "torch.optim.adagrad.Adagrad"))

# Library functions that give a module with parameters on the CPU.
MODEL_MAKERS = ("torchvision.models.", "timm.create_model", "timm.models.", "torch.hub.load")

# Known to do work for each sample: decoding files, or a transform.
DECODING = frozenset(
    f"torchvision.datasets.{name}"
    for name in (
        "ImageFolder DatasetFolder ImageNet CocoDetection CocoCaptions VOCSegmentation"
        " VOCDetection CelebA Flowers102 OxfordIIITPet Food101 StanfordCars Places365"
        " LSUN Caltech101 Caltech256 DTD SUN397 Kinetics UCF101 HMDB51".split()
    )
)
IN_MEMORY = frozenset(
    f"torchvision.datasets.{name}"
    for name in "MNIST FashionMNIST KMNIST EMNIST QMNIST CIFAR10 CIFAR100 SVHN STL10 USPS".split()
)

HOST_READS = frozenset(("item", "tolist", "numpy", "cpu", "nonzero", "__bool__"))
LOG_CALLS = frozenset("debug info warning error critical exception log".split())
MODULE_METHODS = frozenset(
    "to cuda cpu train eval parameters named_parameters buffers named_buffers children modules"
    " named_modules named_children state_dict load_state_dict apply zero_grad half float double"
    " bfloat16 requires_grad_ register_buffer register_parameter add_module register_module"
    " share_memory type xpu compile append extend insert keys values items forward get_parameter"
    " register_forward_hook add_param_group to_empty no_sync".split()
)
