"""Names of other libraries for this spec's fields: the nearest match of a name that spelling does not find."""

from __future__ import annotations

_BY_FIELD = {
    "seed": "random_seed",
    "environment.id": "env env_id env_name gym_id",
    "environment.kwargs": "env_kwargs env_config",
    "environment.passPlace": "env_context worker_index vector_index",
    "environment.frameStack": "n_stack framestack num_framestacks",
    "environment.maxEpisodeSteps": "horizon time_limit",
    "environment.egress": "network_policy",
    "environment.egress.to.cidr": "ip_block",
    "policy.network.mlp.hiddenSizes": "net_arch fcnet_hiddens hidden_layers",
    "policy.network.mlp.activation": "activation_fn fcnet_activation nonlinearity",
    "policy.network.encoders": "encoder features_extractor features_extractor_class multi_input combined_extractor",
    "policy.network.recurrent": "use_lstm use_rnn rnn lstm",
    "policy.network.recurrent.kind": "rnn_type cell_type",
    "policy.network.recurrent.size": "lstm_hidden_size lstm_cell_size rnn_size rnn_hidden_size",
    "policy.normalizeObservations": "norm_obs observation_filter",
    "algorithm.ppo.learningRate": "lr alpha step_size",
    "algorithm.ppo.learningRateSchedule": "anneal_lr lr_schedule",
    "algorithm.ppo.discount": "gamma discount_factor",
    "algorithm.ppo.gaeLambda": "lambda lambda_ lam gae_lam",
    "algorithm.ppo.clipRange": "clip_coef clip_param clip_eps clip_epsilon clip_ratio",
    "algorithm.ppo.clipValueLoss": "clip_range_vf clip_vloss vf_clip_param",
    "algorithm.ppo.entropyCoefficient": "ent_coef ent_coeff entropy_coef entropy_coeff",
    "algorithm.ppo.entropyCoefficientSchedule": "entropy_coeff_schedule",
    "algorithm.ppo.valueCoefficient": "vf_coef vf_coeff vf_loss_coeff value_loss_coef",
    "algorithm.ppo.maxGradientNorm": "max_grad_norm grad_clip clip_grad_norm",
    "algorithm.ppo.epochs": "n_epochs num_epochs update_epochs num_sgd_iter ppo_epochs",
    "algorithm.ppo.minibatchSize": "batch_size mini_batch_size sgd_minibatch_size num_minibatches",
    "algorithm.ppo.sequenceLength": "max_seq_len seq_len recurrence",
    "algorithm.ppo.normalizeAdvantages": "norm_adv normalize_advantage",
    "algorithm.ppo.normalizeRewards": "norm_reward norm_rew",
    "algorithm.ppo.rewardClip": "clip_reward clip_rewards",
    "algorithm.ppo.adamEpsilon": "adam_eps opt_eps",
    "algorithm.pqn.epsilon": "exploration start_e eps_start initial_epsilon exploration_initial_eps",
    "algorithm.pqn.epsilonSchedule": "end_e eps_end final_epsilon exploration_fraction exploration_final_eps",
    "algorithm.pqn.qLambda": "td_lambda",
    "algorithm.dqn.double": "double_q double_dqn",
    "algorithm.dqn.burnIn": "replay_burn_in burn_in_length",
    "algorithm.dqn.valueRescaling": "use_h_function value_function_rescaling rescale_rewards",
    "algorithm.dqn.replay.priorities.largestErrorWeight": "eta priority_eta max_error_weight",
    "algorithm.dqn.targetPeriod": "target_update_interval target_network_frequency target_network_update_freq "
    "target_update_period",
    "algorithm.dqn.importanceExponent": "beta beta0 initial_beta prioritized_replay_beta",
    "algorithm.dqn.replay.capacity": "buffer_size replay_size replay_capacity",
    "algorithm.dqn.replay.start": "learning_starts min_replay_history num_steps_sampled_before_learning_starts",
    "algorithm.dqn.replay.nStep": "multi_step update_horizon",
    "algorithm.dqn.replay.priorities": "prioritized_replay prioritized_er per",
    "algorithm.dqn.replay.priorities.exponent": "prioritized_replay_alpha priority_exponent",
    "algorithm.sac.critic": "qf_arch q_network critic_arch",
    "algorithm.sac.criticLearningRate": "q_lr qf_lr critic_lr",
    "algorithm.sac.tau": "polyak polyak_factor target_update_rate",
    "algorithm.sac.temperature": "initial_alpha init_temperature",
    "algorithm.sac.learnTemperature": "autotune auto_alpha learn_alpha",
    "algorithm.td3.policyPeriod": "policy_delay policy_frequency actor_update_frequency",
    "algorithm.td3.explorationDeviation": "action_noise exploration_noise act_noise",
    "algorithm.td3.targetDeviation": "target_policy_noise policy_noise target_noise smooth_target_policy",
    "algorithm.td3.targetNoiseClip": "noise_clip",
    "policy.network.mlp.shareLayers": "vf_share_layers share_features_extractor actor_critic_share_weights",
    "policy.network.mlp.initialization": "ortho_init init_type policy_initialization",
    "policy.network.impalaCnn": "impala impala_cnn resnet_impala residual_cnn",
    "policy.network.mlp.dueling": "dueling_dqn dueling_nets",
    "policy.network.mlp.quantiles": "n_quantiles num_quantiles num_atoms n_atoms",
    "pacing.trainStepsPerEnvStep": "train_freq train_frequency update_period replay_ratio training_intensity utd",
    "actors.replicas": "num_workers num_rollout_workers num_env_runners num_actors",
    "actors.environments": "n_envs num_envs",
    "actors.environmentsPerActor": "num_envs_per_worker num_envs_per_env_runner",
    "actors.rolloutLength": "n_steps num_steps rollout_fragment_length unroll_length",
    "trainers.replicas": "num_learners num_learner_workers",
    "trainers.batchEnvironments": "train_batch_size",
    "trainers.gpusPerPod": "num_gpus num_gpus_per_learner num_gpus_per_worker",
    "evaluators.replicas": "evaluation_num_workers evaluation_num_env_runners",
    "evaluators.environments": "n_eval_envs",
    "evaluators.episodesPerEnvironment": "n_eval_episodes evaluation_duration",
    "evaluators.everyVersions": "eval_freq evaluation_interval",
    "evaluators.greedy": "deterministic",
    "parameters.from.run": "init_from load_path restore warm_start",
    "parameters.keepLast": "keep_checkpoints_num num_to_keep",
    "parameters.everySteps": "save_freq checkpoint_freq checkpoint_frequency",
    "stop.envSteps": "total_timesteps timesteps_total num_env_steps_sampled_lifetime",
    "stop.returnMean": "episode_reward_mean episode_return_mean",
    "stop.trainSteps": "training_iteration",
    "stop.wallSeconds": "time_total_s",
    "tracking.wandb.project": "wandb_project_name",
}
"""By field of the spec: its names in Stable-Baselines3, CleanRL and RLlib, or in Kubernetes."""


def synonym(name: str) -> tuple[str, ...] | None:
    """Return the path of the field that another library calls ``name``, in snake_case or camelCase; None if unknown."""
    path = _BY_NAME.get(_plain(name))
    return None if path is None else ("spec", *path.split("."))


def all_synonyms() -> tuple[str, ...]:
    """Return every known name."""
    return tuple(name for names in _BY_FIELD.values() for name in names.split())


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


_BY_NAME = {_plain(name): path for path, names in _BY_FIELD.items() for name in names.split()}
