/** Code that loads an export: for a shell, for Python with a table's package, for the trainer whose shape it has. */

/** @import {Values} from "./form.js" */

const NUMBERS = "min_reward max_reward max_staleness weight_version since until top_k max_seq_len limit".split(" ");

/**
 * What is imported, and what is made of `rows`, the answer of the client.
 * @type {Record<string, [imports: string, code: string]>}
 */
const TABLES = {
  pandas: ["import pandas", "frame = pandas.DataFrame(rows)\nprint(frame.head())"],
  polars: ["import polars", "frame = polars.from_dicts(list(rows), infer_schema_length=None)\nprint(frame.head())"],
  datasets: ["from datasets import Dataset", "dataset = Dataset.from_list(list(rows))\nprint(dataset)"],
  Python: ["", "for row in rows:\n    print(sorted(row))"],
};
const SAMPLES = "samples = [Sample.from_dict(row) for row in rows]";
/** @type {typeof TABLES} */
const TRAINERS = {
  slime: ["from slime.utils.types import Sample", SAMPLES],
  miles: ["from miles.utils.types import Sample", SAMPLES],
  verl: ["from verl.experimental.agent_loop.agent_loop import AgentLoopOutput", "outputs = [AgentLoopOutput(**row) for row in rows]"],
  skyrl: [
    "from skyrl.train.generators.base import TrajectoryID",
    `rows = list(rows)
output = {name: [row[name] for row in rows] for name in rows[0]}  # a GeneratorOutput
output["trajectory_ids"] = [TrajectoryID(**one) for one in output["trajectory_ids"]]`,
  ],
  trl: ["", "rows = list(rows)\ncolumns = {name: [row[name] for row in rows] for name in rows[0]}  # of a rollout_func"],
  "trl-async": [
    "import numpy\nfrom trl.experimental.async_grpo.async_rollout_worker import RolloutSample",
    `types = {"input_ids": "int64", "completion_mask": "int64", "old_log_probs": "float32"}
samples = []
for row in rows:
    del row["extra_fields"]
    arrays = {name: numpy.array(row[name], of) for name, of in types.items()}
    samples.append(RolloutSample(**{**row, **arrays}))`,
  ],
  openenv: ["from openenv.core.harness.training import TrainingTrace", 'traces = [TrainingTrace(turns=row["turns"]) for row in rows]'],
  tinker: [
    "import tinker",
    `names = ("target_tokens", "logprobs", "advantages")  # of the advantages: choose grpo above
data = [
    tinker.Datum(
        model_input=tinker.ModelInput.from_ints(row["model_input"]),
        loss_fn_inputs={name: row[name] for name in names if row[name] is not None},
    )
    for row in rows
]`,
  ],
  areal: [
    "import torch\nfrom areal.utils.data import concat_padded_tensors",
    `names = ("input_ids", "loss_mask", "logprobs", "versions", "attention_mask", "rewards")
batch = concat_padded_tensors([{name: torch.tensor(row[name]) for name in names} for row in rows])`,
  ],
  xtuner: ["from xtuner.v1.data_proto.rl_data import RolloutState", "states = [RolloutState(message=[], **row) for row in rows]"],
  rllm: ["from rllm_model_gateway import TraceRecord", 'traces = [TraceRecord(**trace) for row in rows for trace in row["traces"]]'],
  "prime-rl": [
    "from prime_rl.transport.types import TrainingSample",
    `names = TrainingSample.__struct_fields__  # of the advantages: choose grpo above
samples = [TrainingSample(**{name: row[name] for name in names if name in row}) for row in rows]`,
  ],
  atropos: [
    "import httpx",
    `for group in rows:  # the address is that of Atropos' API
    httpx.post("http://127.0.0.1:8000/scored_data", json=group).raise_for_status()`,
  ],
  tree: ["from turnlog import pack_trees", "packed = pack_trees(list(rows))"],
};

/**
 * @param {Values} query the export's parameters
 * @param {string} server its address
 * @returns {Record<string, string>} Python by the name of what loads the rows
 */
export function snippets(query, server) {
  const shape = query.shape ?? "";
  const trainer = TRAINERS[shape];
  const given = Object.entries(query).map(([name, value]) => `${name}=${literal(name, value)}`);
  const call = given.join(", ").length > 60 ? `\n    ${given.join(",\n    ")},\n` : given.join(", ");
  const client = `from turnlog import Turnlog
\nturnlog = Turnlog(${JSON.stringify(server)})  # the token is that of TURNLOG_TOKEN
rows = turnlog.export(${call})`;
  const all = { ...(trainer && { [shape]: trainer }), ...TABLES };
  const made = Object.entries(all).map(([name, [imports, code]]) => [name, `${imports}\n${client}\n${code}\n`.trimStart()]);
  return Object.fromEntries(made);
}

/** @param {string} name @param {string} value @returns {string} as Python writes it */
function literal(name, value) {
  if (name === "metadata") {
    const [key, ...rest] = value.split("=");
    return JSON.stringify({ [key ?? ""]: rest.join("=") });
  }
  if (NUMBERS.includes(name) && Number.isFinite(Number(value))) return value;
  return value === "true" ? "True" : JSON.stringify(value);
}
