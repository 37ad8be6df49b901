#include "kernels/attention.h"

#include <stdexcept>
#include <string>

#include "bindings/arguments.h"
#include "kernels/attention_plan.h"

namespace ropeway {
namespace {

const AttentionKernels& kernels(const Context& context) { return ROPEWAY_TABLE(attention_kernels, context.isa()); }

AttentionPlan* make_plan(const Context& context, const KVStorage& cache, std::int64_t num_blocks, Address positions,
                         Address query_start, Address kv_lengths, Address block_table, Address slots,
                         std::int64_t rows, std::int64_t tokens, std::int64_t table_stride,
                         std::int64_t table_blocks) {
  const AttentionStep step = {
      .positions = pointer<const std::int32_t>(positions),
      .query_start = pointer<const std::int32_t>(query_start),
      .kv_lengths = pointer<const std::int32_t>(kv_lengths),
      .block_table = pointer<const std::int32_t>(block_table),
      .rows = rows,
      .tokens = tokens,
      .table_stride = table_stride,
      .table_blocks = table_blocks,
      .block_size = cache.block_size,
      .num_blocks = num_blocks,
      .kv_heads = cache.kv_heads,
      .begun = cache.begun,
      .slots = pointer<const std::int32_t>(slots),
  };
  return new AttentionPlan(step, context.threads());
}

void write_kv(Context& context, const KVStorage& cache, std::int64_t layer, Address k, Address v,
              const AttentionPlan& plan) {
  const Call call(context);
  kernels(context).write_kv(context, plan.writing(cache, layer, pointer<const float>(k), pointer<const float>(v)));
}

void read_kv(Context& context, const KVStorage& cache, std::int64_t layer, Address blocks, std::int64_t count,
             Address k, Address v) {
  const Call call(context);
  kernels(context).read_kv(
      context, {cache, layer, pointer<const std::int32_t>(blocks), count, pointer<float>(k), pointer<float>(v)});
}

KVType kv_type(const std::string& name) {
  if (name == "fp32") return KVType::fp32;
  if (name == "bf16") return KVType::bf16;
  if (name == "int8") return KVType::int8;
  if (name == "int4") return KVType::int4;
  if (name == "int4-full") return KVType::int4_full;
  throw std::invalid_argument("no kernels for keys and values as " + name);
}

void attention(Context& context, Address q, const KVStorage& cache, std::int64_t layer, const AttentionPlan& plan,
               Address out, std::int64_t heads, float scale, std::int64_t window) {
  const Call call(context);
  kernels(context).attention(
      context, plan.reading(cache, layer, pointer<const float>(q), pointer<float>(out), heads, scale, window));
}

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<BegunKeys>(module, "BegunKeys", "Keys in bfloat16 of the groups that are not full, beside the cache.")
      .def(nb::init<std::int64_t, std::int64_t, std::int64_t>(), nb::arg("layers"), nb::arg("kv_heads"),
           nb::arg("head_dim"))
      .def("to_host", &BegunKeys::to_host)
      .def("to_device", &BegunKeys::to_device)
      .def_prop_ro("nbytes", &BegunKeys::nbytes);
  nb::class_<KVStorage>(module, "KVStorage", "Where the paged cache lies and its shape.")
      .def(nb::new_([](Address data, std::int64_t layers, std::int64_t kv_heads, std::int64_t head_dim,
                       std::int64_t block_size, const std::string& dtype, Address key_factors, BegunKeys* begun) {
             const bool keeps = kv_type(dtype) == KVType::int4_full && data != 0;
             if (keeps != (begun != nullptr)) throw std::invalid_argument("a pool of int4-full needs its begun keys");
             return new KVStorage(make_kv_storage(pointer<std::byte>(data), layers, kv_heads, head_dim, block_size,
                                                  kv_type(dtype), pointer<const float>(key_factors), begun));
           }),
           nb::arg("data"), nb::arg("layers"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("block_size"),
           nb::arg("dtype"), nb::arg("key_factors"), nb::arg("begun").none())
      .def_ro("block_bytes", &KVStorage::block_bytes);
  nb::class_<AttentionPlan>(module, "AttentionPlan", "Work of a step; refers to the block table it was made from.")
      .def_prop_ro("tasks", [](const AttentionPlan& plan) { return plan.tasks.size(); })
      .def_prop_ro("merges", [](const AttentionPlan& plan) { return plan.merges.size(); });
  module.def("plan_attention", &make_plan, Released());
  module.def("write_kv", &write_kv, Released());
  module.def("read_kv", &read_kv, Released());
  module.def("attention", &attention, Released());
}

}  // namespace ropeway
