/** Code that loads an export: for a shell, for Python with a table's package, for the trainer whose shape it has. */

/** @import {Values} from "./form.js" */

const NUMBERS = "min_reward max_reward max_staleness weight_version since until top_k max_seq_len limit".split(" ");

/** What is made of `rows`, a call of the client; a trainer's reader also has its imports. */
const TABLES = {
  pandas: "frame = rows.to_pandas()\nprint(frame.head())",
  polars: "frame = rows.to_polars()\nprint(frame.head())",
  datasets: "dataset = rows.to_dataset()\nprint(dataset)",
  Python: "for row in rows:\n    print(sorted(row))",
};
const SAMPLES = "samples = [Sample.from_dict(row) for row in rows]";
/** @type {Record<string, {imports: string, code: string}>} */
const TRAINERS = {
  slime: { imports: "from slime.utils.types import Sample", code: SAMPLES },
  miles: { imports: "from miles.utils.types import Sample", code: SAMPLES },
  verl: {
    imports: "from verl.experimental.agent_loop.agent_loop import AgentLoopOutput",
    code: "outputs = [AgentLoopOutput(**row) for row in rows]",
  },
  skyrl: {
    imports: "from skyrl.train.generators.base import TrajectoryID",
    code: `names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards", "stop_reasons", "is_last_step")
rows = list(rows)
output = {name: [row[name] for row in rows] for name in names}  # a GeneratorOutput
output["trajectory_ids"] = [TrajectoryID(**row["trajectory_ids"]) for row in rows]`,
  },
  trl: {
    imports: "",
    code: `rows = list(rows)
names = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
columns = {name: [row[name] for row in rows] for name in names}  # what a rollout_func returns`,
  },
  tinker: {
    imports: "import tinker",
    code: `names = ("target_tokens", "logprobs", "advantages")  # advantages: choose grpo above
data = [
    tinker.Datum(
        model_input=tinker.ModelInput.from_ints(row["model_input"]),
        loss_fn_inputs={name: row[name] for name in names if row[name] is not None},
    )
    for row in rows
]`,
  },
  areal: {
    imports: "import torch\nfrom areal.utils.data import concat_padded_tensors",
    code: `names = ("input_ids", "loss_mask", "logprobs", "versions", "attention_mask", "rewards")
batch = concat_padded_tensors([{name: torch.tensor(row[name]) for name in names} for row in rows])`,
  },
  "prime-rl": {
    imports: "from prime_rl.transport.types import TrainingSample",
    code: `names = TrainingSample.__struct_fields__  # advantages: choose grpo above
samples = [TrainingSample(**{name: row[name] for name in names if name in row}) for row in rows]`,
  },
  atropos: {
    imports: "import httpx",
    code: `for group in rows:  # at the address of Atropos' API
    httpx.post("http://127.0.0.1:8000/scored_data", json=group).raise_for_status()`,
  },
  tree: { imports: "from turnlog import pack_trees", code: "packed = pack_trees(list(rows))" },
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
  const made = Object.entries(TABLES).map(([name, code]) => [name, `${client}\n${code}\n`]);
  const own = trainer && [[shape, `${trainer.imports}\n${client}\n${trainer.code}\n`.trimStart()]];
  return Object.fromEntries([...(own ?? []), ...made]);
}

/** @param {string} name @param {string} value @returns {string} as Python writes it */
function literal(name, value) {
  if (NUMBERS.includes(name) && Number.isFinite(Number(value))) return value;
  return value === "true" ? "True" : JSON.stringify(value);
}
