"""Kubernetes manifests: an NVIDIA Dynamo graph, and values of llm-d's modelservice chart, both around vLLM."""

import json
from typing import Any

import yaml

from breakeven.studies.launch import checked, vllm_options
from breakeven.studies.plan import Plan, PoolPlan

VERSION = "REPLACE_WITH_A_RELEASE"  # images are the user's choice: a tag that no one tested would be an invention


def _gpus(pool: PoolPlan) -> int:
    """Accelerators of one engine on one machine."""
    return -(-pool.accelerators // pool.nodes)


def _arguments(plan: Plan, pool: PoolPlan) -> list[str]:
    return [text for name, value in vllm_options(plan, pool) for text in ([name] if value is None else [name, value])]


def dynamo(plan: Plan) -> str:
    """A DynamoGraphDeployment: a frontend that routes by KV cache, and a worker service per pool."""
    image = f"nvcr.io/nvidia/ai-dynamo/vllm-runtime:{VERSION}"
    router = {"balanced": "round-robin", "random": "random"}.get(plan.routing, "kv")
    services: dict[str, Any] = {
        "Frontend": {
            "componentType": "frontend",
            "replicas": 1,
            "envs": [{"name": "DYN_ROUTER_MODE", "value": router}],
            "extraPodSpec": {"mainContainer": {"image": image}},
        }
    }
    if plan.transfer.local_tokens:
        limits = {"policy": "isl_or_load", "eff_isl_threshold": round(plan.transfer.local_tokens)}
        options = ["--router-conditional-disagg", "--router-conditional-disagg-config", json.dumps(limits)]
        checked("dynamo", [(options[0], None), (options[1], None)])
        services["Frontend"]["extraPodSpec"]["mainContainer"] |= {
            "command": ["python3", "-m", "dynamo.frontend"],
            "args": ["--router-mode", "kv", *options],
        }
    for pool in plan.pools:
        mode = [] if pool.role == "pool" else ["--disaggregation-mode", pool.role]
        checked("dynamo", [("--model", None), *[(name, None) for name in mode[:1]]])
        service: dict[str, Any] = {"componentType": "worker", "envFromSecret": "hf-token-secret"}
        if pool.role != "pool":
            service["subComponentType"] = pool.role
        service["replicas"] = pool.replicas
        if pool.nodes > 1:
            service["multinode"] = {"nodeCount": pool.nodes}
        service["resources"] = {"limits": {"gpu": str(_gpus(pool))}}
        service["extraPodSpec"] = {
            "nodeSelector": {"breakeven/accelerator": pool.accelerator.id},
            "mainContainer": {
                "image": image,
                "command": ["python3", "-m", "dynamo.vllm"],
                "args": ["--model", plan.model, *mode, *_arguments(plan, pool)],
            },
        }
        services[f"Vllm{'' if pool.role == 'pool' else pool.role.capitalize()}Worker"] = service
    graph = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": plan.name},
        "spec": {"services": services},
    }
    return _yaml(plan, graph, "kubectl apply -f deployment.yaml")


def llm_d(plan: Plan) -> str:
    """Values of the llm-d-modelservice Helm chart: a decode and a prefill section, a sidecar that joins them."""
    values: dict[str, Any] = {
        "multinode": any(pool.nodes > 1 for pool in plan.pools),
        "modelArtifacts": {"uri": f"hf://{plan.model}", "name": plan.model, "authSecretName": "llm-d-hf-token"},
        "routing": {"servicePort": 8000, "proxy": {"connector": "nixlv2", "secure": False}},
    }
    for pool in plan.pools:
        values["prefill" if pool.role == "prefill" else "decode"] = _llm_d_pool(plan, pool)
    if not plan.split:
        values["prefill"] = {"create": False}
        values["routing"]["proxy"] = {"enabled": False}
    command = f"helm install {plan.name} llm-d-modelservice/llm-d-modelservice -f values.yaml"
    return _yaml(plan, values, command)


def _llm_d_pool(plan: Plan, pool: PoolPlan) -> dict[str, Any]:
    """A section of the chart; what its `parallelism` states is left out of the arguments."""
    stated = ("--tensor-parallel-size", "--data-parallel-size")
    options = [(name, value) for name, value in vllm_options(plan, pool) if name not in stated]
    arguments = [text for name, value in options for text in ([name] if value is None else [name, value])]
    address = {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    container: dict[str, Any] = {
        "name": "vllm",
        "image": f"ghcr.io/llm-d/llm-d-cuda:{VERSION}",
        "modelCommand": "vllmServe",
        "args": arguments,
        "mountModelVolume": True,
    }
    if plan.split:
        container["env"] = [address]
        container["ports"] = [{"containerPort": 5600, "name": "nixl", "protocol": "TCP"}]
        container["resources"] = {"limits": {"rdma/ib": 1}, "requests": {"rdma/ib": 1}}
    parallelism = {"tensor": pool.tensor_parallel}
    if pool.data_parallel > 1:
        parallelism["data"] = pool.data_parallel
    return {
        "create": True,
        "replicas": pool.replicas,
        "parallelism": parallelism,
        "nodeSelector": {"breakeven/accelerator": pool.accelerator.id},
        "containers": [container],
    }


def _yaml(plan: Plan, content: dict[str, Any], command: str) -> str:
    words = "NOTES.md says what differs, and what to fill in"
    head = f"# Written by breakeven for: {plan.title}. {words}.\n# {command}\n"
    return head + yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False, width=110)
