// The page's texts in Chinese, and helpers for elements whose labels are such texts.

import * as elements from "./elements.js";
import { counted, say } from "./language.js";

export { address, input, link, make, short, visible } from "./elements.js";
export { say };

export const labelled = (label, field, className) => elements.labelled(say(label), field, className);
export const choice = (name, options, value) => elements.choice(name, options.map(([key, label]) => [key, say(label)]), value);
export const outcome = (row) => say(elements.outcome(row));
export const plural = counted;

export const CHINESE = {
  "Search-R1 view": "Search-R1 查看", view: "查看", "Skip to the content": "跳到内容", Run: "运行", "connecting …": "正在连接 …",
  "Access token": "访问令牌", "Use token": "使用令牌", "token required": "需要令牌", Pages: "页面",
  "The server requires the token in its environment variable VIEW_TOKEN. It is kept in this tab's memory only.":
    "服务器需要其环境变量 VIEW_TOKEN 中的令牌。令牌只保存在本标签页的内存中。",
  "pages ·": " 页面 · ", "search ·": " 搜索 · ", "previous and next ·": " 上一条和下一条 · ", "within a curve or a dialogue": " 在曲线或对话中移动",
  Curves: "曲线", Trajectories: "轨迹", "no step yet": "还没有步", "step {step}": "第 {step} 步", "reading {files}": "正在读 {files}",
  trajectories: "条轨迹", files: "个文件", lines: "行",
  // curves
  Metrics: "指标", Smoothing: "平滑", none: "无", "a little": "少许", much: "较强", overview: "概览", others: "其他",
  "part of a name, such as em or timing": "名称的一部分，如 em 或 timing", "No metric has such a name.": "没有这个名称的指标。",
  "No metrics yet: they appear after the first step.": "还没有指标：第一步之后会出现。",
  // trajectories
  "newest step": "最新的步", "oldest step": "最早的步", "lowest score": "得分最低", "highest score": "得分最高", "most searches": "搜索最多",
  "least expected tokens": "最意外的词元", any: "全部", Filters: "筛选", right: "正确", "right, not in documents": "正确，文档中没有",
  "wrong: found, not used": "错误：找到了，没有用上", "wrong: no search": "错误：没有搜索", "wrong: one search, not found": "错误：搜索一次，没有找到",
  "wrong: several searches, not found": "错误：搜索多次，没有找到", "found, not used": "找到了，没有用上", "no search": "没有搜索",
  "one search, not found": "搜索一次，没有找到", "several searches, not found": "搜索多次，没有找到", "No values.": "没有数值。",
  training: "训练", validation: "验证",
  "Words in question, queries or answer": "问题、查询或答案中的词", Answer: "答案", Kind: "类别", Status: "状态", Source: "来源", Step: "步",
  Score: "得分", Searches: "搜索", Order: "顺序", from: "从", to: "到", "{first}–{last} of {all}": "第 {first}–{last} 条，共 {all}",
  "{files} still to be read": "还有 {files} 未读", "{lines} could not be read": "{lines} 无法读取", "No trajectory matches these filters.": "没有符合这些条件的轨迹。",
  "This run does not record its training trajectories (trainer.rollout_data_dir=FOLDER does). The first validation will appear here.":
    "这次运行不记录训练轨迹（trainer.rollout_data_dir=文件夹 会记录）。第一次验证会显示在这里。",
  "No trajectories yet.": "还没有轨迹。", step: "步", question: "问题", answer: "答案", outcome: "结果", score: "得分", searches: "搜索",
  tokens: "词元", "log-prob": "对数概率", status: "状态", "(no question)": "（没有问题）", "accepted: {gold}": "标准答案：{gold}", val: "验证",
  first: "首页", previous: "上一个", next: "下一个", last: "末页", answered: "已回答", failed: "失败", "out of turns": "轮数用完",
  "out of budget": "词元用完", "Pages of trajectories": "轨迹的页",
  // one trajectory
  Token: "词元", origin: "来源", "weight version": "权重版本", "Tokens coloured by": "词元着色依据", "log-prob of the engine": "引擎的对数概率",
  "log-prob of the trainer": "训练器的对数概率", "log-prob of the reference": "参考模型的对数概率", "ratio trainer / engine": "训练器与引擎之比",
  "weight of the correction": "修正的权重", "KL to the reference (k1)": "与参考模型的 KL（k1）", advantage: "优势", "value by the critic": "评论家的估值",
  "validations are recorded as text only": "验证只记录文字", "point at a token, or use the arrow keys": "请指向一个词元，或用方向键",
  accepted: "标准答案", source: "数据来源", "This question over the steps": "这个问题在各步", "All of step {step}": "第 {step} 步的全部",
  "Its group {group}": "它的组 {group}", "sample {sample}": "样本 {sample}", "in the loss": "计入损失", masked: "不计入损失",
  "{count} tokens": "{count} 个词元", "weights {version}": "权重 {version}", policy: "策略", observation: "观察", prompt: "提示",
  "segments of policy, observation and prompt look different": "策略、观察和提示的样式不同", "sampled with weights {versions}": "采样所用的权重：{versions}",
  "the redder, the less expected (full at −5 nats)": "越红越意外（−5 奈特为最红）", "red below, green above": "负为红，正为绿",
  "not recorded: {names}": "未记录：{names}", "The dialogue token by token; the arrow keys move between tokens": "逐词元的对话，可用方向键移动",
  text: "文字", unknown: "未知", "loss mask": "损失掩码", probability: "概率", "No call returned a result.": "没有调用返回结果。", "(empty)": "（空）",
  "has the answer": "含有答案", "id {id}": "编号 {id}",
  // one question
  "training and validation": "训练和验证", "No such question": "没有这个问题", "Accepted: ": "标准答案：", "Trajectories by step": "各步的轨迹",
  "answer ": "答案 ",
  // errors and replays
  "The server cannot be reached. Is it still running?": "无法连接服务器。它还在运行吗？", "The server answered with status {status}.": "服务器返回状态 {status}。",
  "Replay from here": "从这里重放", "Compare gradients": "比较梯度", "or query of the turn": "或这一轮的查询",
  "Text of the turn (the policy continues it if it closes neither a call nor an answer)": "这一轮的文字（若没有结束调用或答案，策略会接着写）",
  "Document {number} of the result (removed if both fields are empty)": "结果中的文档 {number}（两栏都空则删去）", "Text of {label}": "{label}的文字",
  "Replaying. Loading the weights takes seconds to minutes …": "正在重放。载入权重需要几秒到几分钟 …", "Replayed: the result is below the dialogue.": "已重放：结果在对话下方。",
  "The access token is missing: reload the page.": "缺少访问令牌：请刷新页面。", "Edit or replay from turn {turn}": "从第 {turn} 轮修改或重放",
  "Replayed from turn {turn}": "从第 {turn} 轮重放", "gradient norm": "梯度范数", "norm of the change": "变化的范数",
  "cosine of replayed and recorded": "重放与记录的余弦", "cosine of change and recorded": "变化与记录的余弦",
};
