# The commands behind the numbers of this folder and of docs/reproduction.md, docs/reproduction_others.md and docs/comparisons.md,
# by section. DIR has the data sets. scripts/try_docs.py types them.

# ---- Beside the authors' public files
python -m fedpfl.train -m experiment=fedobp/paper method=fedavg,local_only,fedper,fedrep,floco dataset=cifar100 \
    engine.precision=bf16 data_dir=DIR
python -m fedpfl.train -m experiment=fedobp/paper method=lg_fedavg method.variant=paper method.personal_init=initial \
    dataset=cifar100 engine.precision=bf16 data_dir=DIR
python -m fedpfl.train experiment=fedobp/paper method=fedobp dataset=cifar100 score=obp_as_published method.ema=0.3 \
    quantile.q=0.99505 local.momentum=0.7 engine.precision=bf16 data_dir=DIR
python -m fedpfl.train experiment=fedobp/paper method=fedper dataset=cifar100 rounds=100 engine.precision=bf16 data_dir=DIR
python -m fedpfl.train experiment=fedobp/paper method=fedper dataset=fmnist partition.alpha=0.5 engine.precision=bf16 data_dir=DIR
python -m fedpfl.train experiment=fedobp/paper method=lg_fedavg \
    dataset=fmnist rounds=100 eval.every=100 eval.finetune_epochs=0 engine.precision=bf16 data_dir=DIR
python -m fedpfl.train -m experiment=fedobp/paper method=fedobp,fedavg,fedper,local_only local.momentum=0.7 data_dir=DIR
python -m fedpfl.train experiment=fedobp/as_published dataset=fmnist partition.alpha=0.1 rounds=100 eval.finetune_epochs=0 data_dir=DIR
python -m fedpfl.train -m experiment=fedobp/paper method=fedavg,fedper dataset=fmnist engine.precision=bf16 data_dir=DIR

# ---- Round by round
python -m fedpfl.report outputs/fedobp --reference docs/results/published_per_round.csv

# ---- Table III: CIFAR100, Dir(0.1)
python -m fedpfl.train -m experiment=fedobp/paper method=fedobp dataset=cifar100 quantile.q=0.9998,0.995,0.99,0.98 \
    local.momentum=0.7 engine.precision=bf16 data_dir=DIR

# ---- One momentum: none
python -m fedpfl.train -m experiment=fedobp/paper method=fedobp dataset=cifar100 seed=42,1,2,3 local.momentum=0.0 data_dir=DIR
python -m fedpfl.train -m experiment=fedobp/paper method=fedavg,fedper,local_only dataset=cifar100 local.momentum=0.0 \
    data_dir=DIR
python -m fedpfl.train -m experiment=fedobp/paper method=fedobp,fedavg dataset=cifar100 partition.alpha=0.5 local.momentum=0.0 \
    data_dir=DIR
python -m fedpfl.train -m experiment=fedobp/paper method=fedper,fedavg,local_only dataset=fmnist partition.alpha=0.5 local.momentum=0.0 data_dir=DIR

# ---- Table IV: MNIST and FashionMNIST
python -m fedpfl.train -m experiment=fedobp/paper method=fedobp dataset=fmnist,mnist partition.alpha=0.1,0.5 \
    local.momentum=0.0,0.7 engine.precision=bf16 data_dir=DIR
python -m fedpfl.train -m experiment=fedobp/paper method=fedavg,fedper dataset=fmnist,mnist partition.alpha=0.1,0.5 \
    engine.precision=bf16 data_dir=DIR
python -m fedpfl.train -m experiment=fedobp/paper method=local_only dataset=fmnist,mnist partition.alpha=0.1,0.5 \
    engine.precision=bf16 data_dir=DIR
python -m fedpfl.train -m experiment=fedobp/paper method=fedavg,local_only dataset=mnist partition.alpha=0.5 \
    local.momentum=0.0 eval.finetune_epochs=0 engine.precision=bf16 data_dir=DIR
python -m fedpfl.train experiment=fedobp/paper method=fedavg dataset=mnist partition.alpha=0.1 \
    local.momentum=0.0 eval.finetune_epochs=0 engine.precision=bf16 data_dir=DIR
python -m fedpfl.train -m experiment=fedobp/paper method=fedrep dataset=fmnist,mnist partition.alpha=0.1,0.5 \
    local.momentum=0.0,0.7 eval.finetune_epochs=0 engine.precision=bf16 data_dir=DIR

# ---- Table IV: FashionMNIST, Dir(0.1), shorter runs
python -m fedpfl.train -m hydra/launcher=lockstep experiment=fedobp/paper method=fedprox,fedrep,fedbabu \
    local.momentum=0.7 engine.precision=bf16 rounds=60 eval.finetune_every=60 data_dir=DIR
python -m fedpfl.train experiment=fedobp/paper method=lg_fedavg method.variant=paper method.personal_init=initial \
    local.momentum=0.7 engine.precision=bf16 rounds=60 eval.finetune_every=60 data_dir=DIR
python -m fedpfl.train -m experiment=fedobp/paper method=scaffold,fedavg local.momentum=0.0 \
    engine.precision=bf16 rounds=60 eval.finetune_every=60 data_dir=DIR

# ---- Table IV: MNIST and FashionMNIST, 50 rounds
python -m fedpfl.train -m hydra/launcher=lockstep experiment=fedobp/paper method=fedrod,fedpac,floco,apfl,fedala,feddpa,ditto,pfedme \
    local.momentum=0.7 engine.precision=bf16 rounds=50 eval.every=25 eval.finetune_every=50 data_dir=DIR
python -m fedpfl.train -m hydra/launcher=lockstep experiment=fedobp/paper method=pfedfda method.variant=paper,as_published \
    local.momentum=0.7 engine.precision=bf16 rounds=50 eval.every=50 eval.finetune_every=50 data_dir=DIR
python -m fedpfl.train experiment=fedobp/paper method=flute method.variant=paper \
    local.momentum=0.7 engine.precision=bf16 rounds=50 eval.every=25 eval.finetune_every=50 data_dir=DIR
python -m fedpfl.train -m experiment=fedobp/paper partition.alpha=0.1,0.5 method=per_fedavg method.outer_lr=0.01 \
    local.momentum=0.7 engine.precision=bf16 rounds=50 eval.every=25 eval.finetune_every=50 data_dir=DIR
python -m fedpfl.train -m hydra/launcher=lockstep experiment=fedobp/paper partition.alpha=0.5 \
    method=fedobp,fedavg,fedper,local_only,fedprox,fedrep,fedbabu,ditto,fedrod,fedpac,floco,apfl,fedala,feddpa,pfedme \
    local.momentum=0.7 engine.precision=bf16 rounds=50 eval.every=25 eval.finetune_every=50 data_dir=DIR
python -m fedpfl.train experiment=fedobp/paper partition.alpha=0.5 method=lg_fedavg method.variant=paper method.personal_init=initial \
    local.momentum=0.7 engine.precision=bf16 rounds=50 eval.every=25 eval.finetune_every=50 data_dir=DIR
python -m fedpfl.train -m experiment=fedobp/paper partition.alpha=0.5 method=flute,pfedfda method.variant=paper \
    local.momentum=0.7 engine.precision=bf16 rounds=50 eval.every=25 eval.finetune_every=50 data_dir=DIR
python -m fedpfl.train -m experiment=fedobp/paper partition.alpha=0.5 method=scaffold,fedavg local.momentum=0.0 \
    engine.precision=bf16 rounds=50 eval.every=25 eval.finetune_every=50 data_dir=DIR

# ---- FedPURIN
python -m fedpfl.train -m hydra/launcher=lockstep experiment=fedpurin/fmnist partition.alpha=0.1 seed=42 partition.train_samples=250 \
    partition.test_samples=50 local.batch_size=50 rounds=15 eval.every=15 engine.precision=bf16 data_dir=DIR \
    method=fedpurin,fedcac method.beta=8
python -m fedpfl.train -m experiment=fedpurin/tau seed=1 dataset=fmnist partition.alpha=0.1 partition.train_samples=100 \
    partition.test_samples=50 model=fedspu_emnist 'dataset.mean=[0.0]' 'dataset.std=[1.0]' local.batch_size=50 rounds=10 \
    eval.every=10 method.beta=5 data_dir=DIR
python -m fedpfl.train -m experiment=fedpurin/norm seed=1 dataset=fmnist partition.alpha=0.1 partition.train_samples=100 \
    partition.test_samples=50 model=fedspu_emnist 'dataset.mean=[0.0]' 'dataset.std=[1.0]' local.batch_size=50 rounds=10 \
    eval.every=10 method.beta=5 data_dir=DIR
python -m fedpfl.train -m experiment=fedpurin/fmnist_ablation seed=1 dataset=fmnist partition.alpha=0.1 partition.train_samples=100 \
    partition.test_samples=50 model=fedspu_emnist local.batch_size=50 rounds=10 eval.every=10 method.beta=5 data_dir=DIR

# ---- FedSelect
python -m fedpfl.train -m hydra/launcher=lockstep experiment=fedselect/cifar10 model=resnet8 partition.test_fraction=0.15 \
    rounds=30 eval.every=15 eval.finetune_every=30 engine.precision=bf16 data_dir=DIR
python -m fedpfl.train -m experiment=fedselect/sizes method=fedper,fedbabu,fedselect partition.samples_per_client=20 model=resnet8 \
    partition.test_fraction=0.05 rounds=30 eval.every=15 eval.finetune_every=15 engine.precision=bf16 data_dir=DIR
python -m fedpfl.train -m experiment=fedselect/sizes method=fedper,fedbabu partition.samples_per_client=20 \
    partition.test_fraction=0.05 rounds=8 eval.every=8 eval.finetune_every=8 engine.precision=bf16 data_dir=DIR
python -m fedpfl.train -m experiment=fedselect/alpha paper=fedselect_cifar10 method.alpha=0.05 model=resnet8 \
    partition.test_fraction=0.05 rounds=6 eval.every=6 eval.finetune_epochs=0 engine.precision=bf16 data_dir=DIR
python -m fedpfl.train -m experiment=fedselect/ablation paper=fedselect_cifar10 method=fedselect model=resnet8 seed=1,2,3,4,5 \
    partition.samples_per_client=200 partition.test_fraction=0.15 method.personalise=most,random rounds=60 eval.every=10 \
    eval.finetune_every=60 engine.precision=bf16 data_dir=DIR
python -m fedpfl.train -m hydra/launcher=lockstep experiment=fedselect/cifar10 method=fedselect,lg_fedavg,fedavg \
    partition.test_fraction=0.15 eval.every=50 eval.finetune_every=100 engine=batched engine.precision=bf16 data_dir=DIR
python -m fedpfl.train -m method=fedselect method.scope=tensor,all dataset=fmnist model=mlp partition=shuffled_shards clients=10 \
    partition.classes_per_client=4 partition.samples_per_client=40 partition.test_fraction=0.03 participation=1 rounds=30 \
    eval.every=30 seed=1,2,3 data_dir=DIR

# ---- FedSPU and its dropout baselines
python -m fedpfl.train -m hydra/launcher=lockstep experiment=fedspu/emnist dataset=fmnist partition.alpha=0.1 seed=42 local.lr=0.0005 \
    rounds=50 eval.every=25 data_dir=DIR

# ---- SubFLOT, HeteroFL, FedRolex, FlexFL
python -m fedpfl.train -m hydra/launcher=lockstep experiment=subflot/cifar10 partition=dirichlet model=lenet5 method=subflot,flexfl seed=42,1 \
    rounds=20 local.lr=0.02 local.batch_size=64 eval.every=20 data_dir=DIR
python -m fedpfl.train -m hydra/launcher=lockstep experiment=subflot/cifar10 partition=dirichlet model=lenet5 method=heterofl,fedrolex seed=42,1 \
    method.widths=[1.0,0.75,0.5,0.25] method.assign=random rounds=20 local.lr=0.02 local.batch_size=64 eval.every=20 data_dir=DIR
python -m fedpfl.train -m experiment=subflot/cifar10 partition=dirichlet model=lenet5 method=subflot method.otp=false method.positions=own,first \
    rounds=20 local.lr=0.02 local.batch_size=64 eval.every=20 data_dir=DIR
python -m fedpfl.train -m experiment=subflot/ablation model=lenet5 seed=42,1 rounds=20 local.lr=0.02 local.batch_size=64 \
    method.lam=0.05 eval.every=20 data_dir=DIR

# ---- FedOBP's quantile chosen by each client, digits
python -m fedpfl.train -m method=fedobp dataset=digits clients=20 participation=0.25 rounds=30 validation=0.1 \
    local.momentum=0.7 eval.every=30 seed=1,2,3 quantile.q=0.5,0.9,0.99,0.999,0.9999
python -m fedpfl.train -m method=fedobp_adaptive dataset=digits clients=20 participation=0.25 rounds=30 validation=0.1 \
    local.momentum=0.7 eval.every=30 seed=1,2,3 'method.q=[0.5,0.9,0.99,0.999,0.9999],[0.99,0.999,0.9999]'

# ---- Equal tuning, newcomers, and who is harmed
SAME="partition=published partition.alpha=0.1 unseen=0.2 rounds=25 eval.every=25 eval.finetune_every=25 local.momentum=0.7 \
    eval.finetune_epochs=5 trials=5 seeds=3 local.lr=choice(0.01,0.02,0.05) engine.precision=bf16 data_dir=DIR"
python -m fedpfl.tune dataset=cifar100 $SAME method=fedavg,local_only,fedper,fedrep,pfedfda hydra.sweep.dir=outputs/equal
python -m fedpfl.tune dataset=cifar100 $SAME method=ditto 'method.lam=choice(0.1,0.5,1)' hydra.sweep.dir=outputs/equal
python -m fedpfl.tune dataset=cifar100 $SAME method=fedobp quantile=tuned 'quantile.q=choice(0.99,0.998,0.9998)' \
    hydra.sweep.dir=outputs/tuned
python -m fedpfl.tune dataset=cifar100 $SAME method=fedobp quantile=paper hydra.sweep.dir=outputs/paper
python -m fedpfl.tune dataset=cifar100 $SAME method=fedobp_adaptive hydra.sweep.dir=outputs/adaptive

# ---- The field's yardsticks, digits and FashionMNIST
OTHERS=fedavg,local_only,fedper,ditto,fedamp,fedas,fedcp,feddbe,feddyn,fedfomo,fedgen,fedphp,fedproto,gpfl,ifca,cfl,knn_per,\
moon,pfedhn,apple
SAME="local.lr=choice(0.02,0.05,0.1) rounds=25 local.epochs=2 validation=0.2 eval.every=5 eval.finetune_epochs=2 \
    eval.finetune_every=25 seeds=3"
DIGITS="dataset=digits clients=20 participation=0.5 trials=6 hydra.sweep.dir=outputs/yardsticks/digits"
FMNIST="dataset=fmnist model=lenet5 partition=published trials=5 data_dir=DIR hydra.sweep.dir=outputs/yardsticks/fmnist"
python -m fedpfl.tune method=$OTHERS $SAME $DIGITS; python -m fedpfl.tune method=fedobp quantile=tuned $SAME $DIGITS
python -m fedpfl.tune method=$OTHERS $SAME $FMNIST; python -m fedpfl.tune method=fedobp quantile=tuned $SAME $FMNIST

# ---- What privacy costs, FashionMNIST
python -m fedpfl.train -m method=fedavg,fedper,lg_fedavg,ditto seed=1,2,3 dataset=fmnist partition=published model=lenet5 \
    local.lr=0.05 local.epochs=2 participation=0.3 rounds=20 eval.every=20 eval.finetune_epochs=5 eval.finetune_every=20 \
    data_dir=DIR hydra.sweep.dir=outputs/private
python -m fedpfl.train -m method=fedavg,fedper,lg_fedavg,ditto seed=1,2,3 dataset=fmnist partition=published model=lenet5 \
    local.lr=0.05 local.epochs=2 participation=0.3 rounds=20 eval.every=20 eval.finetune_epochs=5 eval.finetune_every=20 \
    data_dir=DIR hydra.sweep.dir=outputs/private \
    privacy=client privacy.sampling=poisson privacy.clip=0.3 privacy.noise=0
python -m fedpfl.train -m method=fedavg,fedper,lg_fedavg,ditto seed=1,2,3 dataset=fmnist partition=published model=lenet5 \
    local.lr=0.05 local.epochs=2 participation=0.3 rounds=20 eval.every=20 eval.finetune_epochs=5 eval.finetune_every=20 \
    data_dir=DIR hydra.sweep.dir=outputs/private \
    privacy=client privacy.sampling=poisson privacy.clip=0.3 privacy.epsilon=2,8

# ---- Devices with a deadline, FashionMNIST
python -m fedpfl.train -m method=fedspu,fjord,heterofl,fedavg seed=1,2,3 dataset=fmnist partition=published model=lenet5 \
    local.lr=0.05 rounds=60 eval.every=10 eval.finetune_epochs=5 eval.finetune_every=60 data_dir=DIR system=simulated \
    system.deadline=3 hydra.sweep.dir=outputs/phones
python -m fedpfl.train -m method=fedobp quantile.q=0.995 seed=1,2,3 dataset=fmnist partition=published model=lenet5 \
    local.lr=0.05 rounds=60 eval.every=10 eval.finetune_epochs=5 eval.finetune_every=60 data_dir=DIR system=simulated \
    system.deadline=3 hydra.sweep.dir=outputs/phones
python -m fedpfl.train -m method=fedspu,fjord,heterofl,fedavg seed=1 dataset=fmnist partition=published model=lenet5 \
    local.lr=0.05 rounds=60 eval.every=10 eval.finetune_epochs=5 eval.finetune_every=60 data_dir=DIR system=simulated \
    hydra.sweep.dir=outputs/patient
python -m fedpfl.train -m method=fedobp quantile.q=0.995 seed=1 dataset=fmnist partition=published model=lenet5 \
    local.lr=0.05 rounds=60 eval.every=10 eval.finetune_epochs=5 eval.finetune_every=60 data_dir=DIR system=simulated \
    hydra.sweep.dir=outputs/patient

# ---- Personal adapters, CIFAR100
python -m benchmarks pretrain data_dir=DIR
python -m fedpfl.train experiment=adapters/cifar100 data_dir=DIR
python -m fedpfl.train experiment=adapters/cifar100 method=fedavg adapter=none local.lr=0.1 data_dir=DIR
python -m fedpfl.train experiment=adapters/cifar100 method=fedavg adapter=head local.lr=1 data_dir=DIR

# ---- Hostile clients, and a shifting world (docs/robustness.md, docs/shift.md)
python -m fedpfl.train -m hydra/launcher=lockstep engine=batched seed=1,2,3 dataset=fmnist model=mlp model.hidden=[64] \
    clients=100 partition.samples_per_client=120 rounds=40 local.epochs=1 local.batch_size=16 local.lr=0.05 \
    eval.every=40 eval.finetune_epochs=1 eval.finetune_every=40 attack=backdoor,replacement attack.size=5 \
    attack.share=0.2 method=fedavg,local_only,fedper,ditto,fedala,fedobp,knn_per
python -m fedpfl.train -m hydra/launcher=lockstep engine=batched seed=1,2,3 dataset=fmnist model=mlp model.hidden=[64] \
    clients=100 partition.samples_per_client=120 rounds=40 local.epochs=1 local.batch_size=16 local.lr=0.05 \
    eval.every=5 eval.finetune_epochs=1 eval.finetune_every=40 shift=rotation shift.at=[20] \
    method=fedavg,local_only,fedper,ditto,fedala,fedobp,knn_per

# ---- What privacy costs (docs/privacy.md)
python -m fedpfl.train -m method=fedper,ditto dataset=fmnist model=mlp model.hidden=[32] clients=30 partition.alpha=0.3 partition.samples_per_client=600 \
    participation=0.5 rounds=20 local.epochs=1 local.lr=0.1 \
    eval.every=20 privacy=sample privacy.epsilon=2,8

# ---- Clients with different networks (docs/mixed.md)
python -m fedpfl.train -m seed=1,2,3 dataset=fmnist clients=20 participation=1 rounds=15 partition.alpha=0.3 \
    partition.samples_per_client=80 local.epochs=3 local.batch_size=10 local.lr=0.05 eval.every=5 model=mixed \
    "model.kinds=[{name: mlp, hidden: [64]}, lenet5, {name: mlp, hidden: [256, 64]}]" model.features=64 \
    "model.common={name: mlp, hidden: [32]}" \
    method=local_only,lg_fedavg,fedproto,fedavg_by_kind,fd,fml,fedkd,fedgh,fedtgp,fedmrl
